"""Check the arguments of ``append_paged_kv_cache``, convert them to an AppendProblem, and launch it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from hopwell._calls.launch import Calls
from hopwell._calls.repeat import CheckedCall, OperandMap
from hopwell._checks import arguments as checks
from hopwell._checks import device_data
from hopwell._checks.caches import KV_LAYOUTS, SCALE_TYPES, interleaves_v, pair_or_tensor, scale_of_heads
from hopwell._checks.features import require_problem
from hopwell.kernels import support
from hopwell.kernels.append import device_data as append_data
from hopwell.kernels.append.config import SMALLEST_SCALE, AppendProblem, CacheType, pool_distance
from hopwell.kernels.append.plan import AppendPlan
from hopwell.kernels.launch.arguments import addresses_of
from hopwell.kernels.problem import PageTable
from hopwell.layouts import NVFP4_BLOCK, KVViews, block_scale_views, paged_kv_views

CACHE_TYPES = (*checks.SIXTEEN_BIT, checks.FP8, torch.uint8)
INTERLEAVED_TOKENS, INTERLEAVED_DIM = 4, 4 * NVFP4_BLOCK  # page sizes and V's head dims are multiples of these


class AppendArguments(NamedTuple):
    """All arguments of a call. Caches and their scales are a pair, or one tensor and None.

    With a slot mapping, ``positions`` contains it, and ``batch_indices`` and the arguments of page ids are None.
    """

    append_key: Any
    append_value: Any
    batch_indices: Any
    positions: Any
    cache: Any
    value_cache: Any
    kv_indices: Any
    kv_indptr: Any
    kv_last_page_len: Any
    kv_layout: Any
    k_scale: Any
    v_scale: Any
    scales: Any
    value_scales: Any
    v_scale_layout: Any
    block_tables: Any
    uses_shared_paged_kv_idx: Any
    enable_pdl: Any

    @property
    def paged_kv_cache(self) -> Any:
        """The cache as the caller gave it: one tensor, or a pair of K and V."""
        return self.cache if self.value_cache is None else (self.cache, self.value_cache)

    @property
    def kv_cache_sf(self) -> Any:
        """The block scales as the caller gave them: one tensor, a pair, or None."""
        return self.scales if self.value_scales is None else (self.scales, self.value_scales)


# Names in messages for the fields of AppendArguments that differ from the caller's arguments.
ARGUMENTS = {
    "cache": "paged_kv_cache",
    "value_cache": "paged_kv_cache",
    "scales": "kv_cache_sf",
    "value_scales": "kv_cache_sf",
}
APPEND_OPERANDS = OperandMap(
    tensors=AppendArguments._fields,
    operands={
        "key": "append_key",
        "value": "append_value",
        "key_cache": "cache",
        "value_cache": ("value_cache", "cache"),
        "key_scales": "scales",
        "value_scales": ("value_scales", "scales"),
        "batch_indices": "batch_indices",
        "positions": "positions",
        "key_table": ("block_tables", "kv_indices"),
        "value_table": ("block_tables", "kv_indices"),
        "page_starts": "kv_indptr",
        "k_scale": "k_scale",
        "v_scale": "v_scale",
    },
)


class AppendCalls:
    """Launches append calls, and repeats checked calls without checks. ``by_slot``: the calls have a slot mapping."""

    def __init__(self, by_slot: bool = False) -> None:
        self._calls = Calls(APPEND_OPERANDS)
        self._by_slot = by_slot
        self._names = ARGUMENTS | ({"positions": "slot_mapping"} if by_slot else {})

    def repeat(self, arguments: AppendArguments) -> Any:
        """Launch a call that repeats a checked call, or return None."""
        return self._calls.latest(arguments, None, None) or self._calls.repeat(arguments, None)

    def run(self, arguments: AppendArguments) -> None:
        """Check a call, launch it, and remember it."""
        problem = append_problem(arguments, self._by_slot)
        name = functools.partial(self._calls.operand_map.name, arguments=arguments, renamed=self._names)
        self._calls.notice_gradients((self._names.get(field, field), a) for field, a in arguments._asdict().items())
        on, looks = problem.key.device, device_data.is_enabled()
        if looks:
            device_data.check(append_data.rules_of(problem), on, name)
        plan = AppendPlan(problem)
        views = plan.operands(problem)
        plan.launch(views, name)
        if not (plan.has_work and plan.repeatable) or looks:
            return
        a = arguments
        checked = CheckedCall(
            arguments=arguments,
            written=(a.cache, a.value_cache, a.scales, a.value_scales),
            operands=views,
            addresses=addresses_of(views),
            function=plan.function,
            anchor=plan.anchor,
            constants=plan.constants,
        )
        self._calls.remember(checked, on)


def append_problem(arguments: AppendArguments, by_slot: bool) -> AppendProblem:
    """Check all arguments and convert them to a problem. ``by_slot``: they have a slot mapping."""
    a = arguments
    key, value = _new_tokens(a.append_key, a.append_value)
    on, tokens = key.device, key.shape[0]
    slots = _slots(a.positions, tokens, on) if by_slot else None
    if slots is not None:
        key, value = (rows[: slots.shape[0]] for rows in (key, value))
    arch = support.arch_of(on)
    shared = checks.flag("uses_shared_paged_kv_idx", a.uses_shared_paged_kv_idx)
    interleaves = interleaves_v(a.v_scale_layout)
    kind, caches = _caches(a.paged_kv_cache, a.kv_layout, key, value, shared, interleaves)
    scales = _block_scales(a.kv_cache_sf, a.kv_layout, caches, kind, shared)
    batch, table, starts = _pages(a, shared, on) if slots is None else (0, None, None)
    pdl = checks.optional_flag("enable_pdl", a.enable_pdl)
    problem = AppendProblem(
        key=key,
        value=value,
        key_cache=caches.key,
        value_cache=caches.value,
        key_scales=None if scales is None else scales.key,
        value_scales=None if scales is None else scales.value,
        batch_indices=_index("batch_indices", a.batch_indices, ("tokens", tokens), on) if slots is None else None,
        positions=_index("positions", a.positions, ("tokens", tokens), on) if slots is None else slots,
        page_table=table,
        page_starts=starts,
        batch=batch,
        k_scale=_scale("k_scale", a.k_scale, kind, key),
        v_scale=_scale("v_scale", a.v_scale, kind, key),
        kind=kind,
        programmatic_launch=True if pdl is None else pdl,
    )
    _check_apart(problem, shared)
    require_problem(support.APPEND_SLOTS if by_slot else support.APPEND, problem, arch)
    return problem


def _new_tokens(append_key: Any, append_value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = checks.main_tensor("append_key", append_key), checks.tensor("append_value", append_value)
    checks.dtype("append_key", key, checks.SIXTEEN_BIT)
    checks.dtype("append_value", value, (key.dtype,))
    _on("append_value", value, key.device)
    checks.shape("append_key", key, ("tokens", None), ("kv_heads", None), ("head_dim", None))
    tokens, heads, dim = key.shape
    checks.shape("append_value", value, ("tokens", tokens), ("kv_heads", heads), ("head_dim", None))
    if min(heads, dim, value.shape[2]) < 1:
        raise ValueError(
            f"append_key and append_value must have heads and head_dims of at least 1, got {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    for name, part in (("append_key", key), ("append_value", value)):
        checks.tma_readable(name, part)
    return key, value


def _caches(
    paged_kv_cache: Any, kv_layout: Any, key: torch.Tensor, value: torch.Tensor, shared: bool, interleaves: bool
) -> tuple[CacheType, KVViews]:
    """Return the type of the cache and its canonical views."""
    parts = pair_or_tensor("paged_kv_cache", paged_kv_cache)
    for name, part in parts:
        checks.dtype(name, part, CACHE_TYPES)
        _on(name, part, key.device)
        if part.dtype != parts[0][1].dtype:
            raise ValueError(f"{name} must have the dtype of {parts[0][0]}, {parts[0][1].dtype}, got {part.dtype}")
        checks.tma_readable(name, part)
    of = parts[0][1].dtype
    if of in checks.SIXTEEN_BIT and of != key.dtype:
        raise ValueError(
            f"paged_kv_cache with 16-bit elements must have the dtype of append_key, {key.dtype}, got {of}"
        )
    checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
    caches = paged_kv_views(paged_kv_cache, kv_layout, same_pages=shared, name="paged_kv_cache")
    nvfp4 = CacheType.NVFP4_INTERLEAVED if interleaves else CacheType.NVFP4
    checks.page_size("paged_kv_cache", caches.key.shape[2])
    kind = {checks.FP8: CacheType.E4M3, torch.uint8: nvfp4}.get(of, CacheType.WIDE)
    packing = 2 if kind.is_nvfp4 else 1
    parts_of = (("K", "append_key", key, caches.key), ("V", "append_value", value, caches.value))
    for name, argument, tokens, cache in parts_of:
        wanted, got = (tokens.shape[1], tokens.shape[2]), (cache.shape[1], cache.shape[3] * packing)
        if wanted != got:
            stored = " (two elements a byte)" if kind.is_nvfp4 else ""
            raise ValueError(
                f"{name} of paged_kv_cache must have the heads and head_dim of the new tokens, {wanted}{stored}, "
                f"got {got}"
            )
        if tokens.shape[2] % kind.elements:
            raise ValueError(
                f"{argument} must have a head_dim that is a multiple of {kind.elements} for a paged_kv_cache of {of}, "
                f"got {tokens.shape[2]}"
            )
    if kind is CacheType.NVFP4_INTERLEAVED and (
        caches.key.shape[2] % INTERLEAVED_TOKENS or value.shape[2] % INTERLEAVED_DIM
    ):
        raise ValueError(
            f"v_scale_layout='interleaved' needs a page size that is a multiple of {INTERLEAVED_TOKENS} and a head_dim "
            f"of V that is a multiple of {INTERLEAVED_DIM}, got {caches.key.shape[2]} and {value.shape[2]}"
        )
    return kind, caches


def _block_scales(kv_cache_sf: Any, kv_layout: str, caches: KVViews, kind: CacheType, shared: bool) -> KVViews | None:
    """Return canonical views of the block scales. They are required for NVFP4 and refused otherwise."""
    if not kind.is_nvfp4:
        if kv_cache_sf is not None:
            raise ValueError(
                f"kv_cache_sf must be None unless paged_kv_cache is NVFP4 (torch.uint8), it is {caches.key.dtype}"
            )
        return None
    if kv_cache_sf is None:
        raise ValueError("kv_cache_sf must be provided for an NVFP4 (torch.uint8) paged_kv_cache, got None")
    for name, part in pair_or_tensor("kv_cache_sf", kv_cache_sf):
        checks.dtype(name, part, SCALE_TYPES)
        _on(name, part, caches.key.device)
    return block_scale_views(kv_cache_sf, kv_layout, caches, same_pages=shared, name="kv_cache_sf")


def _pages(a: AppendArguments, shared: bool, on: torch.device) -> tuple[int, PageTable, torch.Tensor | None]:
    """Return the number of requests, the page ids, and the start of each request if page ids are 1-D."""
    given = [name for name in ("kv_indices", "kv_indptr", "block_tables") if getattr(a, name) is not None]
    if given not in (["kv_indices", "kv_indptr"], ["block_tables"]):
        raise ValueError(f"pages must be given as kv_indices and kv_indptr, or as block_tables, got {given or None}")
    if a.block_tables is None:
        if not shared:
            raise ValueError("uses_shared_paged_kv_idx=False needs block_tables [batch, 2, pages_per_request]")
        starts = _index("kv_indptr", a.kv_indptr, ("batch + 1", None), on)
        if starts.shape[0] < 1:
            raise ValueError("kv_indptr must have batch + 1 elements, got none")
        ids = _index("kv_indices", a.kv_indices, ("pages", None), on)
        batch, table = starts.shape[0] - 1, PageTable(ids, ids)
    else:
        tables = checks.tensor("block_tables", a.block_tables)
        checks.dtype("block_tables", tables, checks.INTEGERS)
        _on("block_tables", tables, on)
        starts, batch = None, tables.shape[0] if tables.dim() else 0
        table = checks.page_table(tables, batch, on, shared=shared)
    if a.kv_last_page_len is not None:
        _index("kv_last_page_len", a.kv_last_page_len, ("batch", batch), on)
    return batch, table, starts


def _slots(slot_mapping: Any, tokens: int, on: torch.device) -> torch.Tensor:
    """Check and return the slot of each token; tokens behind the last slot are not written."""
    slots = _index("slot_mapping", slot_mapping, ("slots", None), on)
    if slots.shape[0] > tokens:
        raise ValueError(
            f"slot_mapping must have at most {tokens} elements, the tokens of append_key, got {slots.shape[0]}"
        )
    return slots


def _index(name: str, value: Any, dim: tuple[str, int | None], on: torch.device) -> torch.Tensor:
    """Check and return a contiguous 1-D tensor of indices."""
    checked = checks.tensor(name, value)
    checks.dtype(name, checked, checks.INTEGERS)
    _on(name, checked, on)
    checks.shape(name, checked, dim)
    checks.unit_stride(name, checked)
    return checked


def _scale(name: str, value: Any, kind: CacheType, key: torch.Tensor) -> float | torch.Tensor:
    scale = scale_of_heads(name, value, key.device, key.shape[1])
    if kind is CacheType.WIDE and (isinstance(scale, torch.Tensor) or scale != 1.0):
        raise ValueError(f"{name} must be 1.0 for a 16-bit cache, which has no scales, got {checks.describe(value)}")
    if not isinstance(scale, torch.Tensor) and scale < SMALLEST_SCALE:
        raise ValueError(f"{name} must be positive, and at least {SMALLEST_SCALE} in float32, got {scale}")
    return scale


def _on(name: str, value: torch.Tensor, expected: torch.device) -> None:
    if value.device != expected:
        raise ValueError(f"{name} must be on {expected}, the device of append_key, got {value.device}")


def _check_apart(problem: AppendProblem, shared: bool) -> None:
    """Check that no written tensor shares memory with another tensor, except K and V in pages of one pool."""
    others: list[tuple[str, torch.Tensor | None]] = [("append_key", problem.key), ("append_value", problem.value)]
    for of, key, value in (
        ("paged_kv_cache", problem.key_cache, problem.value_cache),
        ("kv_cache_sf", problem.key_scales, problem.value_scales),
    ):
        if key is None or value is None:
            continue
        distance = pool_distance(key, value)
        # With shared ids, a token's key and value are in one page if the distance is 0.
        in_one_pool = distance is not None and not (shared and distance == 0)
        checks.disjoint(f"K of {of}", key, others)
        checks.disjoint(f"V of {of}", value, others if in_one_pool else [*others, (f"K of {of}", key)])
        others += [(f"K of {of}", key), (f"V of {of}", value)]
