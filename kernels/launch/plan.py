"""From a problem to a launch: what stays the same for given shapes, strides, dtypes and options is done once."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import tvm_ffi  # with hopwell, not in the first call, of whose 55 ms it would be 30 (H200's host, 2026-11-22)

from hopwell.kernels import registry, support
from hopwell.kernels.config.base import TileShape, page_and_head_stride
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.prefill import PrefillConfig, packed_shape
from hopwell.kernels.config.splitting import (
    TICKETS,
    counter_ints,
    cta_parts,
    gmem_levels,
    most_new_tokens,
    node_slots,
    slot_count,
    slot_rows,
    tree_counter_ints,
)
from hopwell.kernels.jit import toolchain
from hopwell.kernels.launch.arguments import (
    OPERANDS,
    SCALE_STRIDES,
    DecodeGeometry,
    Geometry,
    Operands,
    ScaledDecodeGeometry,
    ScaledGeometry,
    ScaledOperands,
    addresses_of,
    page_divisor,
)
from hopwell.kernels.launch.device_data import first_fault, rules_of
from hopwell.kernels.launch.tickets import tickets
from hopwell.kernels.problem import MAX_KEYS, AttentionProblem, Family, LseLayout, PageTable, TokenOffsets
from hopwell.kernels.registry import Buildable

if TYPE_CHECKING:
    from hopwell.emulator import Span

MAX_INT = 2**31 - 1  # of a size that kernels compare with lengths
# CTAs that read K and V of one head at the same time. With one, every tile comes from memory: 1 x 4096 tokens of 128 KV
# heads, head dims 192/128, took 12 % longer. There 2 are as good, 8 and 16 slower (H200, 2026-11-22).
SHARING = 4
RESULTS = ("out", "lse", "statistics", "skipped", "out_scales", "scratch")
INDEX_BYTES = 4
EMULATED_SMS = 4  # multiprocessors of the emulated device


@dataclass(frozen=True)
class HostArguments:
    """What a family of kernels takes besides addresses and scales, as functions of the problem."""

    geometry: Callable[[AttentionProblem, Any], tuple[int, ...]]
    numbers: Callable[[AttentionProblem], tuple[float, ...]]  # passed by value besides the two scales
    counters: Callable[[Any, Any], int]  # int32 that the kernel wants to find zero, from geometry and config


class Plan:
    """A compiled kernel with its geometry. Addresses and scales come with each launch."""

    def __init__(self, problem: AttentionProblem):
        query = problem.query
        family = HOST_ARGUMENTS[problem.family]
        config = registry.resolve(problem, support.arch_of(query.device))
        target = support.target_of(query.device)
        self.config = config if config.target == target else replace(config, compiled_for=target)
        self.has_work = min(problem.batch, query.shape[0], problem.max_q_len) > 0
        # Whether later calls may use it without a look at anything but the tensors: the emulator has settings.
        self.repeatable = query.device.type == "cuda"
        self._options = (*family.numbers(problem), int(problem.programmatic_launch))
        if self.has_work:
            sizes = family.geometry(problem, self.config)
            self.tickets = tickets(query.device, family.counters(sizes, self.config))
            self.tickets.reserve()
            self.function = bind(self.config, query.device)
            self.anchor = device_anchor(query.device)
            # One object holds them all: converting 30 integers in each call would cost more than the launch.
            self._geometry = tvm_ffi.convert(tuple(sizes))

    def launch(self, addresses: Sequence[int], softmax_scale: float, output_scale: float) -> None:
        """Launch on the current stream of the plan's device.

        ``addresses`` are those of :func:`operands`, in its order. A scale counts where its address is 0.
        """
        self.function(self.anchor, (*addresses, self.tickets.address()), *self.constants(softmax_scale, output_scale))

    def constants(self, softmax_scale: float, output_scale: float) -> tuple[Any, ...]:
        """Return what ``function`` takes after the anchor and the addresses."""
        return self._geometry, softmax_scale, output_scale, *self._options

    def execute(self, problem: AttentionProblem, name: Callable[[str], str] = str) -> torch.Tensor:
        """Compute the problem that the plan was made for; allocates the output where the problem has none. ``name``
        returns what the emulator's messages call an operand."""
        out = problem.out
        if out is None:
            query = problem.query
            out = torch.empty((*query.shape[:2], problem.v_dim), dtype=query.dtype, device=query.device)
        if not self.has_work and problem.lse is not None and problem.lse.layout is LseLayout.PADDED:
            problem.lse.tensor.fill_(-math.inf)  # as a kernel does with rows that no request has
        if self.has_work:
            views = operands(problem, out)
            addresses = addresses_of(views)
            if not self.repeatable:
                _check_device_data(problem, name)
            with contextlib.nullcontext() if self.repeatable else self._emulated_memory(views, name):
                self.launch(addresses, *host_scales(problem))
        return out

    @contextlib.contextmanager
    def _emulated_memory(self, views: Sequence[torch.Tensor | None], name: Callable[[str], str]) -> Iterator[None]:
        """Tell the emulator which memory a launch may reach."""
        from hopwell.emulator import EmulatorError, Span

        counters, size = self.tickets.address(), self.tickets.bytes
        roles = ((operand, "out" if operand in RESULTS else "in") for operand in OPERANDS)
        operands = [(name(operand), role, view) for (operand, role), view in zip(roles, views, strict=False)]
        try:
            with emulated_memory(operands, [Span("tickets", counters, size)]):
                yield
        except EmulatorError:
            ctypes.memset(counters, 0, size)  # a kernel that was stopped has not done it
            raise


def _check_device_data(problem: AttentionProblem, name: Callable[[str], str]) -> None:
    """What leads a kernel out of its operands is a fault. On the emulator TMA would read zeros there, as on a GPU."""
    from hopwell import emulator

    fault = first_fault(rules_of(problem), defined=False)
    if fault is not None:
        raise emulator.MemoryFault(fault.message(name(fault.operand)))


@contextlib.contextmanager
def emulated_memory(
    operands: Iterable[tuple[str, str, torch.Tensor | None]], others: Iterable[Span] = ()
) -> Iterator[None]:
    """Tell the emulator which memory a launch may reach: names, roles and tensors of operands, and ``others``. A role
    is that of ``emulator.Span``: "in" is only read, "out" is only written, "inout" is partly written."""
    from hopwell import emulator

    spans = [emulator.span_of(name, view, role) for name, role, view in operands if view is not None]
    with emulator.memory([*spans, *others]):
        yield


@functools.cache
def device_anchor(device: torch.device) -> torch.Tensor:
    """Return a tensor without elements: TVM-FFI takes the device of a launch, and with it the stream, from a tensor,
    and any other would have to be of the dimensions that the kernel was compiled for."""
    return torch.empty(0, dtype=torch.int32, device=device)


def bind(config: Buildable, device: torch.device) -> Any:
    """Return the launch function: the GPU's, or the same compiled kernel in the emulator for tensors on the CPU."""
    if device.type == "cuda":
        return toolchain.function(config)
    from hopwell import emulator

    built = toolchain.artifact(config)
    return emulator.load(built.object_file, built.ptx).function(config.name)


def execute(problem: AttentionProblem) -> torch.Tensor:
    """Compute ``problem`` on the current stream and return the output, allocated where the problem has none."""
    return Plan(problem).execute(problem)


def operands(problem: AttentionProblem, out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors whose addresses a kernel gets: ``launch.ScaledOperands``, or ``launch.Operands`` where the
    kernel has no scales of blocks."""
    table, lse = problem.page_table or _topk_page_table(problem), problem.lse

    def start(offsets: TokenOffsets | None) -> torch.Tensor | None:
        return None if offsets is None else offsets.tensor

    def on_device(scale: float | torch.Tensor) -> torch.Tensor | None:
        return scale if isinstance(scale, torch.Tensor) else None

    named = dict(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        out=out,
        q_offsets=start(problem.q_offsets),
        o_offsets=start(problem.o_offsets),
        k_offsets=start(problem.k_offsets) if problem.dcp_rank is None else problem.dcp_rank.kv_lens,
        v_offsets=start(problem.v_offsets),
        q_lens=problem.q_lens,
        kv_lens=problem.kv_lens,
        key_table=None if table is None else table.key,
        value_table=None if table is None else table.value,
        softmax_scale=on_device(problem.softmax_scale),
        output_scale=on_device(problem.output_scale),
        sinks=problem.sinks,
        lse=None if lse is None else lse.tensor,
        lse_offsets=None if lse is None else start(lse.offsets),
        statistics=problem.statistics,
        skipped=problem.skipped_tiles,
        output_factor=on_device(problem.output_factor),
        draft_mask=problem.draft_mask,
        scratch=problem.scratch,
    )
    kv, out_scales = problem.kv_scales, problem.out_scales
    if kv is None and out_scales is None:
        return Operands(**named)
    return ScaledOperands(
        **named,
        key_scales=None if kv is None else kv.key,
        value_scales=None if kv is None else kv.value,
        out_scales=None if out_scales is None else out_scales.tensor,
    )


def _topk_page_table(problem: AttentionProblem) -> PageTable | None:
    """Return lists of tokens in the place of page ids."""
    return None if problem.token_table is None else PageTable(problem.token_table, problem.token_table)


def host_scales(problem: AttentionProblem) -> tuple[float, float]:
    """Return the softmax scale and the output scale as kernel arguments."""
    factor = 1.0 if problem.out_scales is None else problem.out_scales.factor
    return _host_value(problem.softmax_scale), _host_value(problem.output_scale) * factor


def _host_value(scale: float | torch.Tensor) -> float:
    """Return a scale as a kernel argument; what the kernel reads from memory counts as 1 here."""
    return 1.0 if isinstance(scale, torch.Tensor) else scale


def geometry(problem: AttentionProblem, config: PrefillConfig) -> tuple[int, ...]:
    """Return the run-time sizes and strides of a problem."""
    query, heads, kv_heads = problem.query, problem.query.shape[1], problem.key.shape[1]
    tile_m = config.tile.m
    tile = packed_shape(problem, tile_m) if config.packs_heads else TileShape.of(1, tile_m)
    q_tiles = -(-problem.max_q_len // tile.tokens)
    ctas = multiprocessors(query.device)
    sizes = Geometry(
        tokens=query.shape[0],
        heads=heads,
        batch=problem.batch,
        grid=min(problem.batch * heads // tile.heads * q_tiles, ctas),
        **_strides(problem),
        q_token_elements=_token_elements(problem.q_offsets),
        o_token_elements=_token_elements(problem.o_offsets),
        k_token_elements=_token_elements(problem.k_offsets),
        v_token_elements=_token_elements(problem.v_offsets),
        mask_size=problem.mask.size,
        head_swizzle=head_swizzle_heads(heads, kv_heads, ctas) // tile.heads,
        **_lse_geometry(problem),
        tile_heads=tile.heads,
        capacity=_capacity(problem),
    )
    if not config.has_block_scales:
        return sizes
    out = problem.out_scales
    return ScaledGeometry(
        **sizes._asdict(),
        **_scale_strides(problem),
        out_scale_row=0 if out is None else out.first_row,
        out_scale_columns=0 if out is None else out.tensor.shape[1],
    )


def _scale_strides(problem: AttentionProblem) -> dict[str, int]:
    """Return the strides of ``launch.SCALE_STRIDES`` by name."""
    scales = problem.kv_scales
    if scales is None:
        return dict.fromkeys(SCALE_STRIDES, 0)
    k_page, k_head, k_row, _ = scales.key.stride()
    v_page, v_head, v_row, _ = scales.value.stride()
    return dict(
        k_scale_page=k_page,
        k_scale_head=k_head,
        k_scale_row=k_row,
        v_scale_page=v_page,
        v_scale_head=v_head,
        v_scale_row=v_row,
    )


def head_swizzle_heads(heads: int, kv_heads: int, ctas: int) -> int:
    """Say how many query heads a section has on ``ctas`` multiprocessors, see ``parts/partition/tiles.py``. All have
    the same size: a short one at the end of the list would have long tiles and none to go beside them."""
    most = max(ctas // SHARING, 1)
    together = max(count for count in range(1, most + 1) if kv_heads % count == 0)
    return together * (heads // kv_heads)


def decode_geometry(problem: AttentionProblem, config: DecodeConfig) -> tuple[int, ...]:
    """Return the run-time sizes and strides of a decode problem, whose scratch has ``splitting.scratch_bytes`` or
    more."""
    query, lse = problem.query, problem.lse
    group = query.shape[1] // problem.key.shape[1]
    rows = group * most_new_tokens(problem.max_q_len, query.shape[0], group)
    # Rows of different tokens have different keys where each has a list.
    row_tiles = -(-(rows if problem.token_table is None else group) // config.tile.m)
    sms = multiprocessors(query.device)
    grid = sms * config.ctas_per_sm
    kv_heads, columns, capacity = problem.key.shape[1], config.head_dim_v, problem.max_kv_len
    if config.has_tree:
        slots = node_slots(config.tile.m, kv_heads * row_tiles, columns, grid, config.splitting_bytes)
    else:
        by_cta_parts = isinstance(config, MlaConfig) and not config.batch_invariant
        slots = slot_count(max(rows, 1), kv_heads, columns, capacity, sms, problem.is_latent, by_cta_parts)
    sizes = DecodeGeometry(
        tokens=query.shape[0],
        batch=problem.batch,
        group=group,
        q_len=problem.max_q_len,
        row_tiles=row_tiles,
        grid=grid,
        **_strides(problem),
        mask_size=problem.mask.size,
        draft_words=0 if problem.draft_mask is None else problem.draft_mask.shape[-1] // 2,
        topk=0 if problem.token_table is None else problem.token_table.shape[1],
        lse_row=0 if lse is None else lse.tensor.stride(0),
        lse_head=0 if lse is None else lse.tensor.stride(1),
        lse_natural=int(lse is not None and lse.natural),
        slots=slots,
        slot_rows=slot_rows(rows, problem.is_latent),
        cta_parts=cta_parts(max(row_tiles, 1), grid),
        gmem_levels=gmem_levels(config.chunk_tokens, capacity, config.smem_levels),
        dcp_world=1 if problem.dcp_rank is None else problem.dcp_rank.count,
        dcp_rank=0 if problem.dcp_rank is None else problem.dcp_rank.index,
        capacity=_capacity(problem),
    )
    if not config.has_block_scales:
        return sizes
    return ScaledDecodeGeometry(**sizes._asdict(), **_scale_strides(problem))


def _capacity(problem: AttentionProblem) -> int:
    """Return the most keys that a request can have: kernels do not read tables past their ends."""
    if problem.token_table is not None:
        return MAX_KEYS  # lists have ends of their own, and keys may be more
    rows = problem.key.shape[2]
    return min(rows if problem.page_table is None else problem.page_table.key.shape[1] * rows, MAX_INT)


def multiprocessors(device: torch.device) -> int:
    """Say how many multiprocessors a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return EMULATED_SMS


def _strides(problem: AttentionProblem) -> dict[str, int]:
    """Return what the geometries of prefill and decode have in common."""
    query, key, value, table = (
        problem.query,
        problem.key,
        problem.value,
        problem.page_table or _topk_page_table(problem),
    )
    (k_page, k_head), (v_page, v_head) = page_and_head_stride(key), page_and_head_stride(value)
    q_token, q_head = _row_strides(query)
    o_token, o_head = _row_strides(problem.out) if problem.out is not None else _packed(query.shape[1], problem.v_dim)
    return dict(
        kv_heads=key.shape[1],
        q_token=q_token,
        q_head=q_head,
        o_token=o_token,
        o_head=o_head,
        k_pages=key.shape[0],
        v_pages=value.shape[0],
        k_rows=key.shape[2],
        v_rows=value.shape[2],
        page_divisor=page_divisor(key.shape[2]),
        k_page=k_page,
        k_head=k_head,
        k_row=_row_stride(key),
        v_page=v_page,
        v_head=v_head,
        v_row=_row_stride(value),
        key_table_row=0 if table is None else _row_words(table.key),
        value_table_row=0 if table is None else _row_words(table.value),
    )


def _row_words(table: torch.Tensor) -> int:
    """Return the distance between the rows of a table in words of 32 bits, of which an int64 has two."""
    return table.stride(0) * table.element_size() // INDEX_BYTES


def _lse_geometry(problem: AttentionProblem) -> dict[str, int]:
    lse = problem.lse
    if lse is None:
        return dict(lse_token_elements=1, lse_request=0, lse_rows=0, lse_row=0, lse_head=0, lse_natural=0)
    row, head = lse.tensor.stride()[-2:]
    return dict(
        lse_token_elements=_token_elements(lse.offsets),
        # Rows between requests: they lie one behind the other, which a padded tensor's strides guarantee.
        lse_request={LseLayout.PADDED: lse.tensor.shape[1], LseLayout.RAGGED: -1}.get(lse.layout, 0),
        lse_rows=lse.tensor.shape[-2],
        lse_row=row,
        lse_head=head,
        lse_natural=int(lse.natural),
    )


def _token_elements(offsets: TokenOffsets | None) -> int:
    return 1 if offsets is None else max(offsets.token_elements, 1)


def _packed(heads: int, dim: int) -> tuple[int, int]:
    return heads * dim, dim


def _row_strides(view: torch.Tensor) -> tuple[int, int]:
    """Return the token and head stride of a [tokens, heads, dim] view; those of dimensions of size 1 are chosen to fit
    TMA."""
    tokens, heads, dim = view.shape
    packed = _packed(heads, dim)
    return (
        view.stride(0) if tokens > 1 else packed[0],
        view.stride(1) if heads > 1 else packed[1],
    )


def _row_stride(view: torch.Tensor) -> int:
    """Return the stride between the rows of a [pages, heads, rows, dim] view."""
    return view.stride(2) if view.shape[2] > 1 else view.shape[3]


_PREFILL = HostArguments(
    geometry=geometry,
    numbers=lambda problem: (problem.score.soft_cap, problem.skip_softmax),
    counters=lambda sizes, config: TICKETS,
)
_DECODE = HostArguments(
    geometry=decode_geometry,
    numbers=lambda problem: (_host_value(problem.output_factor),),
    counters=lambda sizes, config: tree_counter_ints(sizes.slots) if config.has_tree else counter_ints(sizes.slots),
)
HOST_ARGUMENTS = {Family.PREFILL: _PREFILL, Family.DECODE: _DECODE, Family.MLA: _DECODE}
