"""The list of implementations: its supported problems, its refusals and its shipped kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from helpers.batches.decode import DecodeBatch
from helpers.cases.kernel_problems import cache, empty, paged
from helpers.covering.shipped import all_shipped

from hopwell._entries.decoding import workspace_bytes
from hopwell.kernels import registry, support
from hopwell.kernels.capability import features, samples
from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import KvType, Traits
from hopwell.kernels.config.decode import COMPILED_HEAD_DIMS, KV_TYPES, NARROW_TYPES
from hopwell.kernels.launch import plan
from hopwell.kernels.launch.geometry import EMULATED_SMS
from hopwell.kernels.problem import AttentionProblem, Family, Mask, MaskKind
from hopwell.kernels.registry import (
    IMPLEMENTATIONS,
    Implementation,
    architectures,
    build,
    refuse,
    resolve,
    shipped_configs,
)
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig


@pytest.fixture(autouse=True)
def fresh_dtypes() -> Iterator[None]:
    """Forget the dtypes of queries before and after tests, which change the list of implementations."""
    registry.query_dtype.cache_clear()
    yield
    registry.query_dtype.cache_clear()


def problem(**changes: object) -> AttentionProblem:
    return paged(*cache("tuple-HND", 16, (128, 128)), **changes)


@pytest.mark.parametrize(("family", "arch"), IMPLEMENTATIONS)
def test_what_is_compiled_ahead_belongs_to_the_family(family: Family, arch: str) -> None:
    configs = all_shipped(arch, family)
    assert configs
    for config in configs:
        assert (config.family, config.arch) == (family, arch)
        assert type(config) in [made.config for made in IMPLEMENTATIONS[family, arch]]
        assert config.name.startswith(f"{family.value}_{arch}_")


@pytest.mark.parametrize(("family", "arch"), [key for key, made in IMPLEMENTATIONS.items() if len(made) > 1])
def test_two_kinds_of_configs_never_share_a_name(family: Family, arch: str) -> None:
    """The name is the key of a compiled kernel. Kinds may be equal in every field, unless their rows differ."""
    shipped = all_shipped(arch, family)
    for first, second in itertools.combinations([made.config for made in IMPLEMENTATIONS[family, arch]], 2):
        preferred, others = ([config for config in shipped if isinstance(config, kind)] for kind in (first, second))
        assert preferred
        if first.instruction_in_name == second.instruction_in_name:
            assert not {config.rows for config in preferred} & {config.rows for config in others}
            continue
        for config in preferred:
            other = object.__new__(second)
            other.__dict__.update(config.__dict__)
            assert other.name != config.name


def test_architectures_are_those_of_the_support_matrix() -> None:
    assert architectures(Family.APPEND) == support.ARCHS
    entries = {Family.PREFILL: support.CONTEXT, Family.DECODE: support.XQA, Family.MLA: support.MLA}
    for family, entry in entries.items():
        assert architectures(family) == features.ENTRIES[entry].feature("16bit").archs


@pytest.mark.parametrize("family", Family)
def test_an_architecture_without_kernels_is_refused(family: Family) -> None:
    of = problem(family=family, scratch=None if family is Family.PREFILL else empty(1, dtype=torch.uint8))
    message = refuse(of, "sm_80")
    assert message is not None
    assert message.endswith(f"kernel for sm_80; supported: {', '.join(architectures(family))}")
    assert all_shipped("sm_80", family) == []


def test_a_reason_or_none() -> None:
    assert refuse(problem(), "sm_90a") is None
    narrow = replace(problem(), query=empty(600, 4, 24))
    assert str(refuse(narrow, "sm_90a")).startswith("head dims (QK/V) 24/128 have no kernel on sm_90a")


def test_decode_needs_scratch() -> None:
    with pytest.raises(ValueError, match="a problem of MLA decode needs scratch, got None"):
        resolve(problem(family=Family.MLA), "sm_90a")


@pytest.mark.parametrize(("family", "arch"), IMPLEMENTATIONS)
def test_a_config_is_built_by_its_family(family: Family, arch: str) -> None:
    """Modules that build are known by name, so one kernel of each kind has to find its own."""
    kinds = ("has_tree", "uses_fp8_mma", "kv_bytes")
    configs = {tuple(getattr(c, kind, None) for kind in kinds): c for c in all_shipped(arch, family)}
    for config in configs.values():
        kernel, arguments = build(config)
        assert kernel.config is config
        assert callable(kernel)
        assert arguments


@dataclass(frozen=True)
class DummyConfig:
    """A config of kernels that exist in this test only."""

    arch: str
    family: ClassVar[Family] = Family.DECODE
    name: ClassVar[str] = "dummy"
    matrix_instruction: ClassVar[str] = ""

    @property
    def target(self) -> str:
        return self.arch


def test_another_implementation_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, workspaces and refusals ask the implementation; no other module knows its kernels."""

    def resolve(problem: Any, arch: str) -> DummyConfig:
        if problem.query.shape[2] != 48:
            raise NotImplementedError("dummy kernels take head dim 48")
        return DummyConfig(arch)

    launched: list[tuple[Any, ...]] = []
    made = Implementation(
        DummyConfig,
        resolve,
        shipped=lambda arch, types, preferred: iter([DummyConfig(arch)] if types == support.TYPES_FP8 else []),
        build=lambda config: (f"built {config.name}", ()),
        query_dtype=lambda query, kv: torch.float16 if query == kv == torch.float8_e4m3fn else query,
        operands=lambda problem, out: {"out": out, "query": problem.query},
        geometry=lambda problem, config: (problem.batch, 17),
        numbers=lambda problem: (0.25,),
        counters=lambda sizes, config: sizes[1],
        scratch_bytes=lambda sizes: 1000 * sizes.rows + sizes.sms,
    )
    monkeypatch.setitem(registry.IMPLEMENTATIONS, (Family.DECODE, "sm_90a"), (made,))
    monkeypatch.setattr(plan, "bind", lambda config, device: lambda *arguments: launched.append(arguments))
    data = DecodeBatch([1, 1], [5, 7], heads=2, kv_heads=1, head_dim=48, device="cpu")
    problem = data.decode(16)
    found = plan.Plan(problem)
    out = found.execute(problem)
    (_, addresses, geometry, _, _, number, _) = launched[0]
    assert (*geometry,) == (2, 17)
    assert number == 0.25
    assert addresses == (out.data_ptr(), problem.query.data_ptr(), found.tickets.address())
    assert found.tickets.bytes == 4 * 18, "17, rounded up"
    assert registry.build(found.config) == ("built dummy", ())
    dummy = [DummyConfig("sm_90a")]
    assert [c for c in kernels_to_ship("sm_90a", (support.TYPES_FP8,)) if c.family is Family.DECODE] == dummy
    assert [c for c in kernels_to_ship("sm_90a") if c.family is Family.DECODE] == []
    sample = samples.decode(dims=(48, 48), query=samples.FP8, kv=samples.FP8)
    assert features.as_launched(sample, "sm_90a").query.dtype == torch.float16
    assert workspace_bytes(3, 1, 48, 100, "cpu") == 3000 + EMULATED_SMS
    assert registry.refuse(data.decode(16), "sm_90a") is None
    other = DecodeBatch([1], [5], heads=2, kv_heads=1, head_dim=64, device="cpu")
    assert registry.refuse(other.decode(16), "sm_90a") == "dummy kernels take head dim 48"


@dataclass(frozen=True)
class FewRowsConfig(Sm120DecodeConfig):
    """A config of decode kernels for 16-bit caches, two head dims and few rows of a request."""

    instruction_in_name: ClassVar[str] = "few"
    head_dims: ClassVar[tuple[tuple[int, int], ...]] = ((64, 64), (128, 128))
    narrow_head_dims: ClassVar[dict[KvType, tuple[tuple[int, int], ...]]] = {}
    most_rows: ClassVar[int]

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        more = f"{traits.rows} packed rows are more than {cls.most_rows}" if traits.rows > cls.most_rows else None
        return super().refusal(traits, arch) or more


@pytest.mark.parametrize("most_rows", [16, 32, 64])
def test_an_implementation_serves_what_the_one_before_it_refuses(
    most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls find their kernels among the shipped ones, and no shipped kernel is without a call."""
    arch = "sm_100a"
    monkeypatch.setattr(FewRowsConfig, "most_rows", most_rows, raising=False)
    first = registry._decode(FewRowsConfig, lambda config: ("few rows", ()))
    *_, last = IMPLEMENTATIONS[Family.DECODE, arch]
    monkeypatch.setitem(IMPLEMENTATIONS, (Family.DECODE, arch), (first, last))
    shipped = list(shipped_configs(arch, Family.DECODE))
    assert len({config.name for config in shipped}) == len(shipped)
    dtypes = {kv_type: dtype for dtype, kv_type in NARROW_TYPES.items()}
    found = []
    for dim, kv_type, rows in itertools.product(COMPILED_HEAD_DIMS, KV_TYPES, (1, 8, 9, 16, 17, 32, 33, 64, 65)):
        key, value = cache("tuple-HND", 16, (dim, dim), dtype=dtypes.get(kv_type, torch.bfloat16))
        changes = dict(query=empty(3, 2 * rows, dim), q_offsets=None, max_q_len=1, mask=Mask(MaskKind.FULL))
        of = paged(key, value, family=Family.DECODE, scratch=empty(1, dtype=torch.uint8), **changes)
        config = resolve(of, arch)
        found.append(config)
        assert config in shipped
        own = kv_type is KvType.WIDE and dim in (64, 128) and rows <= most_rows
        assert type(config) is (FewRowsConfig if own else Sm120DecodeConfig), (dim, kv_type, rows)
        assert (build(config)[0] == "few rows") == own
    fields = [(c.mask, c.dtype, c.box_rows) for c in found[:1]]
    assert {c for c in shipped if (c.mask, c.dtype, c.box_rows) in fields} == set(found)
