"""The support table prints what the entry points enforce."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.calls.valid_calls import FORMS, Form

from hopwell import emulator
from hopwell.kernels import support
from hopwell.kernels.capability import features, gpu_runs, samples
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.registry import prefill_type, shipped_configs
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig


def test_keys_are_unique_and_archs_known() -> None:
    for name, entry in features.ENTRIES.items():
        keys = [feature.key for feature in entry.features]
        assert len(set(keys)) == len(keys), name
        assert all(set(feature.archs) <= set(support.ARCHS) for feature in entry.features)


def test_require_passes_what_is_supported() -> None:
    for name, entry in features.ENTRIES.items():
        for feature in entry.features:
            for arch in feature.archs:
                features.require(name, feature.key, "x=1", arch)


def test_refusal_names_entry_feature_argument_arch_and_alternatives() -> None:
    with pytest.raises(NotImplementedError) as caught:
        features.require(support.CONTEXT, "fp16_softmax", "use_fp16_softmax=True", "sm_90a")
    message = str(caught.value)
    assert message.startswith(f"{support.CONTEXT} on sm_90a supports these extras: attention sinks; ")
    assert message.endswith("; got use_fp16_softmax=True")

    text = "^{} on sm_80 supports no head dims, got head_dim=512; head dim 512: supported on sm_90a, .*, sm_120a$"
    with pytest.raises(NotImplementedError, match=text.format(support.XQA)):
        features.require(support.XQA, "large_head_dim", "head_dim=512", "sm_80")


def test_a_row_has_what_its_implementations_do_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    row = features.ENTRIES[support.XQA].feature("16bit")
    assert replace(row).archs == support.ARCHS
    for kind in (Sm100DecodeConfig, Sm120DecodeConfig):
        monkeypatch.setattr(kind, "head_dims", ((64, 64),))
    assert replace(row).archs == support.HOPPER


@pytest.mark.parametrize("entry", features.ENTRIES)
def test_a_row_without_cases_names_the_rest(entry: str) -> None:
    rest = [row.key for row in features.ENTRIES[entry].features if not row.cases]
    assert all(key.startswith("other_") for key in rest if key not in ("fp16_softmax", "spcompress"))


def test_matrix_has_a_row_for_each_feature_and_a_column_for_each_arch() -> None:
    text = features.support_matrix()
    for name, entry in features.ENTRIES.items():
        assert f"`{entry.module}.{name}`" in text
        for feature in entry.features:
            cells = " | ".join(", ".join(feature.marks(arch)) or "-" for arch in support.ARCHS)
            assert f"| {feature.title} | {cells} |\n" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {len(support.ARCHS) + 2}


@pytest.mark.parametrize(
    ("entry", "key", "marks"),
    [
        (support.CONTEXT, "16bit", ("● wgmma", "○ tcgen05", "◐ mma.sync")),
        (support.CONTEXT, "large_head_dim", ("● wgmma", "◐ mma.sync", "◐ mma.sync")),
        (support.CONTEXT, "fp8", ("● wgmma e4m3", "○ tcgen05 e4m3", "○ mma.sync e4m3, block-scaled")),
        (support.XQA, "16bit", ("● wgmma", "○ tcgen05", "◐ mma.sync")),
        (support.XQA, "fp8_kv", ("● mma.sync", "○ tcgen05", "◐ mma.sync")),
        (
            support.XQA,
            "fp8",
            tuple(f"{each} (Q cast to 16 bits)" for each in ("● mma.sync", "○ tcgen05", "◐ mma.sync")),
        ),
        (support.MLA, "fp8_kv", ("● wgmma", "○ tcgen05", "◐ mma.sync")),
        (support.MLA, "fp8", ("● wgmma e4m3", "○ tcgen05 e4m3", "◐ mma.sync (Q cast to 16 bits)")),
        (support.APPEND, "nvfp4_kv", ("●", "◐", "◐")),
        (support.CONTEXT, "fp16_softmax", ("", "", "")),
    ],
)
def test_a_mark_names_where_a_kernel_has_run_and_its_instruction(entry: str, key: str, marks: tuple[str, ...]) -> None:
    feature = features.ENTRIES[entry].feature(key)
    assert [", ".join(feature.marks(arch)) for arch in ("sm_90a", "sm_100a", "sm_120a")] == list(marks)
    assert feature.marks("sm_103a") == feature.marks("sm_100a")


@pytest.mark.parametrize("entry", [support.FMHA_V2, support.XQA, support.MLA])
def test_a_new_row_has_the_mark_of_the_emulator_until_it_has_run(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows with the same kernels may have run: a new mask, for example, does not get their mark."""
    row = next(row for row in features.ENTRIES[entry].features if row.kind == "masks")
    new = replace(row, key="a_new_mask")
    assert all(mark.startswith(gpu_runs.EMULATED) for arch in support.ARCHS for mark in new.marks(arch))
    (problem, *_), hopper = [new.sample(**case) for case in new.cases], gpu_runs.HOPPER_KERNELS
    ran = hopper | {problem.family: hopper[problem.family] | {new.key}}
    monkeypatch.setattr(gpu_runs, "HOPPER_KERNELS", ran)
    assert new.marks("sm_90a") == row.marks("sm_90a")
    assert all(mark.startswith(gpu_runs.EMULATED) for mark in new.marks("sm_120a")), "with other kernels"


def test_rows_that_have_run_are_in_the_table() -> None:
    rows = [row for entry in features.ENTRIES.values() for row in entry.features if row.cases]
    keys = {(row.sample(**row.cases[0]).family, row.key) for row in rows}
    for record in (gpu_runs.HOPPER_KERNELS, gpu_runs.SM120_KERNELS):
        assert {(family, key) for family, names in record.items() for key in names} <= keys


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a"), ((12, 1), "sm_120a")],
)
def test_arch_of_cuda_devices(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    support._cuda_arch.cache_clear()
    assert support.arch_of(torch.device("cuda", 5)) == arch
    support._cuda_arch.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 1), (11, 0), (13, 0)])
def test_arch_of_other_cuda_devices(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    support._cuda_arch.cache_clear()
    text = rf"cuda:5.*{capability[0]}\.{capability[1]}.*{', '.join(support.ARCHS)}"
    with pytest.raises(NotImplementedError, match=text):
        support.arch_of(torch.device("cuda", 5))


def test_arch_of_other_devices() -> None:
    assert support.arch_of(torch.device("cpu")) == "sm_90a"
    with pytest.raises(NotImplementedError, match="meta"):
        support.arch_of(torch.device("meta"))


def test_arch_of_the_cpu_is_the_emulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulator.use("sm_100a"):
        assert support.arch_of(torch.device("cpu")) == "sm_100a"
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_120a")
    assert support.arch_of(torch.device("cpu")) == "sm_120a"
    monkeypatch.setenv("HOPWELL_EMULATE", "off")
    with pytest.raises(ValueError, match="HOPWELL_EMULATE=off"):
        support.arch_of(torch.device("cpu"))


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("emulated", "kernels", "target"),
    [("sm_90a", "sm_90a", "sm_90a"), ("sm_103a", "sm_103a", "sm_103a")]
    + [(arch, "sm_120a", "sm_120f") for arch in ("sm_120a", "sm_121a")],
)
def test_devices_run_their_own_kernels(emulated: str, kernels: str, target: str) -> None:
    with emulator.use(emulated):
        assert (support.arch_of(CPU), support.target_of(CPU)) == (kernels, target)


@pytest.mark.parametrize("emulated", ["sm_90a", "sm_100a", "sm_103a"])
def test_kernels_of_another_arch_are_compiled_for_the_device(monkeypatch: pytest.MonkeyPatch, emulated: str) -> None:
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    with emulator.use(emulated):
        assert (support.arch_of(CPU), support.target_of(CPU)) == ("sm_120a", emulated)


def test_kernels_of_another_arch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    support._cuda_arch.cache_clear()
    device = torch.device("cuda", 5)
    assert (support.arch_of(device), support.target_of(device)) == ("sm_120a", "sm_90a")
    support._cuda_arch.cache_clear()


@pytest.mark.parametrize(
    ("kernels", "emulated", "message"),
    [
        ("sm_90a", "sm_120a", "HOPWELL_KERNELS=sm_90a: .*device cpu, which is sm_120a; kernels that can: sm_120a"),
        ("sm_100a", "sm_90a", "kernels that can: sm_90a, sm_120a"),
        ("sm_120a", "sm_89", "kernels that can: none"),
        ("sm_120", "sm_90a", "HOPWELL_KERNELS must be one of sm_90a, sm_100a, sm_103a, sm_120a"),
    ],
)
def test_kernels_that_the_device_cannot_run(
    monkeypatch: pytest.MonkeyPatch, kernels: str, emulated: str, message: str
) -> None:
    monkeypatch.setenv("HOPWELL_KERNELS", kernels)
    with emulator.use(emulated), pytest.raises(ValueError, match=message):
        support.arch_of(CPU)


def test_configs_have_a_target() -> None:
    config = next(shipped_configs("sm_90a"))
    assert config.target == "sm_90a"
    family = replace(config, arch="sm_120a")
    assert (family.target, family.name) == ("sm_120f", config.name.replace("sm_90a", "sm_120a"))
    moved = replace(family, compiled_for="sm_90a")
    assert (moved.target, moved.name) == ("sm_90a", config.name.replace("sm_90a", "sm_120a_on_sm_90a"))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_entry_refuses_an_arch_without_kernels(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    monkeypatch.setattr(support, "arch_of", lambda device: "sm_80")
    with pytest.raises(NotImplementedError, match=f"{form.function.__name__}.*sm_80"):
        form.function(**form.build())


@pytest.mark.parametrize("entry", features.ENTRIES)
def test_every_architecture_has_what_hopper_has(entry: str) -> None:
    for feature in features.ENTRIES[entry].features:
        assert feature.archs in ((), support.ARCHS), feature.key


def test_blackwell_has_its_own_kernels() -> None:
    context, xqa = (features.ENTRIES[entry] for entry in (support.CONTEXT, support.XQA))
    own = ("16bit", "head_dim", "page_size", "cache", "causal", "sinks", "skip_softmax", "lse", "tensor_scales")
    for arch in support.BLACKWELL:
        assert {context.feature(key).marks(arch) for key in own} == {("○ tcgen05",)}
        assert context.feature("fp8").marks(arch) == ("○ tcgen05 e4m3",)
        for key in ("fp8_out", "nvfp4_out"):
            assert context.feature(key).marks(arch) == ("○ tcgen05", "○ tcgen05 e4m3"), key
        for key in ("fp8_kv", "nvfp4_kv"):
            assert context.feature(key).marks(arch) == ("○ tcgen05",), key
        assert all("mma.sync" in mark for mark in context.feature("large_head_dim").marks(arch))
        for row in xqa.features:
            instruction = "mma.sync" if row.key == "large_head_dim" else "tcgen05"
            assert all(instruction in mark for mark in row.marks(arch) if mark), row.key


def test_sm120_has_decode_head_dims_of_hopper() -> None:
    others = features.ENTRIES[support.XQA].feature("other_head_dim")
    every = itertools.product(range(8, 601, 8), repeat=2)
    dims = {each for each in every if not others.is_asked(samples.decode(dims=each))}
    assert dims == set(DecodeConfig.head_dims) == set(Sm120DecodeConfig.head_dims)


def test_every_prefill_head_dim_is_in_the_row_of_its_kernels() -> None:
    problems = {dims: samples.prefill(dims=dims) for dims in itertools.product(range(8, 601, 8), repeat=2)}
    for arch in support.ARCHS:
        served = {dims for dims, one in problems.items() if features.lacking(support.CONTEXT, one, arch) is None}
        assert served == set(prefill_type(arch).all_tiles())


@pytest.mark.parametrize("entry", features.ENTRIES)
def test_problems_need_the_rows_that_they_stand_for(entry: str) -> None:
    """The table refuses a problem exactly if no kernel serves it."""
    for row in features.ENTRIES[entry].features:
        for case in row.cases:
            problem = row.sample(**case)
            assert row.is_asked(problem), (row.key, case)
            for arch in support.ARCHS:
                lacks = features.lacking(entry, problem, arch) is not None
                assert lacks == (features.refuse(problem, arch) is not None), (row.key, case, arch)


@pytest.mark.parametrize(
    ("form", "feature"),
    [
        (form, feature.key)
        for form in FORMS
        if form.runs
        for name in [form.function.__name__]
        for feature in features.table_of(name).features
        if feature.key in ("16bit", "head_dim", "cache")
    ],
    ids=str,
)
def test_the_table_decides(monkeypatch: pytest.MonkeyPatch, form: Form, feature: str) -> None:
    name = form.function.__name__
    table = support.SAME_AS.get(name, name)
    entry = features.table_of(name)
    rows = tuple(replace(row, cases=()) if row.key == feature else row for row in entry.features)
    monkeypatch.setitem(features.ENTRIES, table, replace(entry, features=rows))
    with pytest.raises(NotImplementedError, match=name):
        form.function(**form.build())
