"""The list of implementations: its supported problems, its refusals and its shipped kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from helpers.batches.decode import DecodeBatch
from helpers.cases.kernel_problems import cache, empty, paged

from hopwell._entries.decoding import workspace_bytes
from hopwell.kernels import registry, support
from hopwell.kernels.capability import features
from hopwell.kernels.launch import plan
from hopwell.kernels.launch.geometry import EMULATED_SMS
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.registry import (
    IMPLEMENTATIONS,
    Implementation,
    architectures,
    build,
    implementation,
    refuse,
    resolve,
    shipped_configs,
)
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig


def problem(**changes: object) -> AttentionProblem:
    return paged(*cache("tuple-HND", 16, (128, 128)), **changes)


@pytest.mark.parametrize(("family", "arch"), IMPLEMENTATIONS)
def test_what_is_compiled_ahead_belongs_to_the_family(family: Family, arch: str) -> None:
    configs = list(shipped_configs(arch, family))
    assert configs
    for config in configs:
        assert (config.family, config.arch) == (family, arch)
        own = {Sm100PrefillConfig, Sm100MlaConfig} if arch in support.BLACKWELL else set()
        kinds = {IMPLEMENTATIONS[family, arch].config} | own
        assert type(config) in kinds
        assert config.name.startswith(f"{family.value}_{arch}_")


@pytest.mark.parametrize(("family", "arch"), [key for key, one in IMPLEMENTATIONS.items() if one.preferred])
def test_two_kinds_of_configs_never_share_a_name(family: Family, arch: str) -> None:
    """The name is the key of a compiled kernel, and two kinds may be equal in every field."""
    found = implementation(family, arch)
    preferred = [config for config in shipped_configs(arch, family) if isinstance(config, found.preferred)]
    assert preferred
    for config in preferred:
        other = object.__new__(found.config)
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
    assert list(shipped_configs("sm_80", family)) == []


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
    configs = {tuple(getattr(c, kind, None) for kind in kinds): c for c in shipped_configs(arch, family)}
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
        shipped=lambda arch: iter([DummyConfig(arch)]),
        build=lambda config: (f"built {config.name}", ()),
        geometry=lambda problem, config: (problem.batch, 17),
        numbers=lambda problem: (0.25,),
        counters=lambda sizes, config: sizes[1],
        scratch_bytes=lambda rows, kv_heads, columns, capacity, sms: 1000 * rows + sms,
    )
    monkeypatch.setitem(registry.IMPLEMENTATIONS, (Family.DECODE, "sm_90a"), made)
    monkeypatch.setattr(plan, "bind", lambda config, device: lambda *arguments: launched.append(arguments))
    data = DecodeBatch([1, 1], [5, 7], heads=2, kv_heads=1, head_dim=48, device="cpu")
    problem = data.decode(16)
    found = plan.Plan(problem)
    found.execute(problem)
    (_, addresses, geometry, _, _, number, _) = launched[0]
    assert (*geometry,) == (2, 17)
    assert number == 0.25
    assert addresses[-1] == found.tickets.address()
    assert found.tickets.bytes == 4 * 18, "17, rounded up"
    assert registry.build(found.config) == ("built dummy", ())
    assert workspace_bytes(3, 1, 48, 100, "cpu") == 3000 + EMULATED_SMS
    assert registry.refuse(data.decode(16), "sm_90a") is None
    other = DecodeBatch([1], [5], heads=2, kv_heads=1, head_dim=64, device="cpu")
    assert registry.refuse(other.decode(16), "sm_90a") == "dummy kernels take head dim 48"
