"""From a problem to a kernel's arguments: tensors at their addresses, strides and parameters in place."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cases.kernel_problems import cache, contiguous, empty, paged

from hopwell.kernels.capability import samples
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.launch import geometry as geometry_module
from hopwell.kernels.launch import plan
from hopwell.kernels.launch.arguments import (
    OPERANDS,
    Addresses,
    DecodeAddresses,
    Geometry,
    ScaledAddresses,
    ScaledDecodeAddresses,
    ScaledGeometry,
)
from hopwell.kernels.launch.geometry import prefill_geometry as geometry
from hopwell.kernels.launch.operands import decode_operands, prefill_operands
from hopwell.kernels.launch.plan import Plan, host_scales
from hopwell.kernels.masks import WIDEST
from hopwell.kernels.problem import (
    AttentionProblem,
    BlockScales,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    OutputScales,
    PageTable,
    Score,
    ScoreKind,
    TokenOffsets,
)
from hopwell.kernels.registry import resolve
from hopwell.kernels.sm90.prefill.kernel import PrefillSm90, build


def numbers(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return empty(size, dtype=dtype)


def everything() -> tuple[AttentionProblem, dict[str, torch.Tensor]]:
    """Return a problem with every tensor that a kernel can take, and these tensors by the field names of Addresses."""
    key, value = cache("tuple-HND", 16, (64, 64), dtype=torch.uint8)  # of NVFP4, two elements in a byte
    names = ("q_offsets", "o_offsets", "k_offsets", "v_offsets", "q_lens", "kv_lens", "lse_offsets", "skipped")
    tensors = {name: numbers(4) for name in names}
    tensors |= {name: numbers(1, torch.float32) for name in ("softmax_scale", "output_scale", "output_factor")}
    tensors |= {name: empty(3, 8, dtype=torch.int32) for name in ("key_table", "value_table")}
    tensors |= dict(
        query=empty(600, 4, 128),
        key=key,
        value=value,
        out=empty(600, 4, 64, dtype=torch.uint8),
        sinks=numbers(4, torch.float32),
        lse=empty(600, 4, dtype=torch.float32),
        statistics=empty(600, 4, 2, dtype=torch.float32),
        draft_mask=empty(600, 2, dtype=torch.uint16),
        key_scales=empty(40, 2, 16, 8, dtype=torch.float8_e4m3fn),
        value_scales=empty(40, 2, 16, 8, dtype=torch.float8_e4m3fn),
        out_scales=empty(640, 32, dtype=torch.float8_e4m3fn),
        scratch=numbers(99, torch.uint8),
    )
    t = tensors
    offsets = {name: TokenOffsets(t[name]) for name in ("q_offsets", "o_offsets", "k_offsets", "v_offsets")}
    same = ("query", "out", "q_lens", "kv_lens", "softmax_scale", "output_scale", "output_factor", "sinks")
    same += ("statistics", "draft_mask", "scratch")
    problem = paged(
        key,
        value,
        **offsets,
        **{name: t[name] for name in same},
        page_table=PageTable(t["key_table"], t["value_table"]),
        lse=LogSumExp(t["lse"], LseLayout.OFFSETS, natural=True, offsets=TokenOffsets(t["lse_offsets"])),
        skipped_tiles=t["skipped"],
        kv_scales=BlockScales(t["key_scales"], t["value_scales"]),
        out_scales=OutputScales(t["out_scales"], first_row=0, factor=2.0),
    )
    return problem, tensors


class TestOperands:
    def test_each_tensor_has_its_place(self) -> None:
        """Places are counted by hand in the callers: the order of OPERANDS."""
        problem, tensors = everything()
        assert problem.out is not None
        found = prefill_operands(problem, problem.out)
        assert set(tensors) == set(OPERANDS)
        assert tuple(found) == OPERANDS
        for name, tensor in found.items():
            assert tensor is tensors[name], name
        places = {"out": 3, "kv_lens": 9, "sinks": 14, "lse": 15, "statistics": 17, "scratch": 21, "key_scales": 22}
        assert {name: OPERANDS.index(name) for name in places} == places
        assert (*OPERANDS, "tickets") == ScaledAddresses._fields

    def test_kernels_without_block_scales_have_no_place_for_them(self) -> None:
        problem, _ = everything()
        found = prefill_operands(replace(problem, kv_scales=None, out_scales=None), problem.out)
        assert tuple(found) == Addresses._fields[:-1]

    @pytest.mark.parametrize("sample", [samples.decode, samples.mla])
    def test_decode_has_lengths_of_all_dcp_ranks_where_prefill_has_offsets_of_keys(self, sample: Any) -> None:
        problem = sample(mask=MaskKind.CYCLIC)
        found = decode_operands(problem, None)
        assert (*found, "tickets") == DecodeAddresses._fields
        assert found["dcp_kv_lens"] is problem.dcp_rank.kv_lens
        assert decode_operands(sample(), None)["dcp_kv_lens"] is None
        changed = {of: to for of, to in zip(Addresses._fields, DecodeAddresses._fields, strict=True) if of != to}
        assert changed == {"k_offsets": "dcp_kv_lens"}
        scaled = decode_operands(samples.decode(kv=torch.uint8), None)
        assert (*scaled, "tickets") == ScaledDecodeAddresses._fields

    def test_absent_tensors(self) -> None:
        key, value = (empty(40, 2, 128).transpose(0, 1)[None] for _ in range(2))
        problem = contiguous(key, value)
        found = prefill_operands(problem, None)
        there = {"query", "key", "value", "q_offsets", "k_offsets", "kv_lens"}
        assert {name for name, tensor in found.items() if tensor is not None} == there

    def test_scales(self) -> None:
        """A scale is passed by value or read from memory; its value has no effect if it is read."""
        problem, _ = everything()
        plain = replace(problem, out_scales=None)
        assert host_scales(plain) == (1.0, 1.0)
        assert host_scales(replace(plain, softmax_scale=0.25)) == (0.25, 1.0)
        assert host_scales(replace(plain, output_scale=3.0)) == (1.0, 3.0)

    def test_factor_of_an_nvfp4_output(self) -> None:
        """The factor is passed by value, and kernels multiply with the value that they read."""
        problem, _ = everything()
        assert host_scales(problem) == (1.0, 2.0)
        assert host_scales(replace(problem, output_scale=3.0)) == (1.0, 6.0)


class TestGeometry:
    @staticmethod
    def of(problem: AttentionProblem) -> Geometry:
        return geometry(problem, resolve(problem, "sm_90a"))

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_strides_are_those_of_the_tensors(self, dims: tuple[int, int]) -> None:
        """Columns are padded in shared memory only."""
        g = self.of(paged(*cache("tuple-HND", 16, dims)))
        dim_qk, dim_v = dims
        assert (g.tokens, g.heads, g.kv_heads, g.batch) == (600, 4, 2, 3)
        assert (g.q_token, g.q_head, g.o_token, g.o_head) == (4 * dim_qk, dim_qk, 4 * dim_v, dim_v)
        assert (g.k_pages, g.k_rows, g.page_divisor) == (5, 16, 4)
        assert (g.k_page, g.k_head, g.k_row) == (2 * 16 * dim_qk, 16 * dim_qk, dim_qk)
        assert (g.v_pages, g.v_rows) == (5, 16)
        assert (g.v_page, g.v_head, g.v_row) == (2 * 16 * dim_v, 16 * dim_v, dim_v)
        assert (g.key_table_row, g.value_table_row) == (8, 8)

    def test_room_between_heads(self) -> None:
        wide = [empty(600, 4, 48)[..., :40], empty(600, 4, 64)[..., :40]]
        g = self.of(paged(*cache("tuple-HND", 16, (40, 40)), query=wide[0], out=wide[1]))
        assert (g.q_token, g.q_head, g.o_token, g.o_head) == (4 * 48, 48, 4 * 64, 64)

    @pytest.mark.parametrize(
        ("mask", "size"),
        [
            (Mask(MaskKind.FULL), 0),
            (Mask(MaskKind.CAUSAL), 0),
            (Mask(MaskKind.SLIDING_WINDOW, 0), 0),
            (Mask(MaskKind.SLIDING_WINDOW, 127), 127),
            (Mask(MaskKind.SLIDING_WINDOW, 2**31 - 1), WIDEST),
            (Mask(MaskKind.CHUNKED, chunk=1), 1),
            (Mask(MaskKind.CHUNKED, chunk=8192), 8192),
            (Mask(MaskKind.CHUNKED, chunk=2**30), 2**30),
            (Mask(MaskKind.CHUNKED, chunk=2**31 - 1), WIDEST),
        ],
        ids=str,
    )
    def test_parameters_of_masks(self, mask: Mask, size: int) -> None:
        assert self.of(paged(*cache("tuple-HND", 16, (128, 128)), mask=mask)).mask_size == size

    @pytest.mark.parametrize(
        ("kv_heads", "group", "head_swizzle"),
        [(1, 8, 8), (8, 4, 32), (32, 1, 32), (40, 1, 20), (36, 2, 36), (37, 1, 1), (128, 1, 32)],
    )
    def test_head_swizzle(self, monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, head_swizzle: int) -> None:
        """Up to 33 KV heads for 132 SMs have sections of one size."""
        monkeypatch.setattr(geometry_module, "multiprocessors", lambda device: 132)
        views = cache("tuple-HND", 16, (128, 128), heads=kv_heads)
        assert self.of(paged(*views, query=empty(600, kv_heads * group, 128))).head_swizzle == head_swizzle

    def test_a_device_with_few_multiprocessors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(geometry_module, "multiprocessors", lambda device: 1)
        assert self.of(paged(*cache("tuple-HND", 16, (128, 128), heads=2))).head_swizzle == 2

    def test_log_sum_exp(self) -> None:
        problem = paged(*cache("tuple-HND", 16, (128, 128)))
        names = ("lse_token_elements", "lse_request", "lse_rows", "lse_row", "lse_head", "lse_natural")

        def got(lse: LogSumExp | None) -> tuple[int, ...]:
            g = self.of(replace(problem, lse=lse))
            return tuple(getattr(g, name) for name in names)

        ragged, padded = empty(600, 4, dtype=torch.float32), empty(3, 20, 4, dtype=torch.float32)
        assert got(None) == (1, 0, 0, 0, 0, 0)
        assert got(LogSumExp(ragged, LseLayout.RAGGED, natural=False)) == (1, -1, 600, 4, 1, 0)
        assert got(LogSumExp(ragged.T.contiguous().T, LseLayout.RAGGED, natural=True)) == (1, -1, 600, 1, 600, 1)
        assert got(LogSumExp(padded, LseLayout.PADDED, natural=True)) == (1, 20, 20, 4, 1, 1)
        heads_first = empty(3, 4, 20, dtype=torch.float32).transpose(1, 2)
        assert got(LogSumExp(heads_first, LseLayout.PADDED, natural=True)) == (1, 80, 20, 1, 20, 1)
        offsets = TokenOffsets(numbers(3), token_elements=4)
        assert got(LogSumExp(ragged, LseLayout.OFFSETS, natural=True, offsets=offsets)) == (4, 0, 600, 4, 1, 1)

    def test_every_field_is_an_integer(self) -> None:
        assert all(type(value) is int for value in self.of(everything()[0]))


COUNTERS = SimpleNamespace(reserve=lambda: None, address=lambda: 77, bytes=8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the arguments of compiled kernels' calls."""
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(plan, "bind", lambda config, device: lambda *arguments: recorded.append(arguments))
    monkeypatch.setattr(plan.support, "native_arch", lambda device: "sm_90a")
    monkeypatch.setattr(plan, "tickets", lambda device, ints: COUNTERS)
    monkeypatch.setattr(plan, "_check_device_data", lambda problem, name: None)  # meta tensors have no data
    return recorded


class TestLaunch:
    PARAMETERS = list(inspect.signature(inspect.unwrap(PrefillSm90.__call__)).parameters)[1:]

    def launched(self, problem: AttentionProblem, calls: list[tuple[Any, ...]]) -> dict[str, Any]:
        made = Plan(problem)
        made.launch(range(1, len(Addresses._fields)), 0.125, 2.5)
        anchor = calls[-1][0]
        assert (anchor.device, anchor.numel()) == (problem.query.device, 0)
        return dict(zip(self.PARAMETERS, calls[-1], strict=False))

    def test_arguments_are_the_kernels_parameters(self, calls: list[tuple[Any, ...]]) -> None:
        problem = paged(
            *cache("tuple-HND", 16, (128, 128)),
            score=Score(ScoreKind.SOFT_CAP, 30.0),
            skip_softmax=500.0,
            programmatic_launch=True,
        )
        found = self.launched(problem, calls)
        # The DSL takes the stream from the environment.
        assert list(found) == self.PARAMETERS[:-1]
        assert self.PARAMETERS[-1] == "stream"
        assert Addresses(*found["addresses"]) == Addresses(*range(1, len(Addresses._fields)), tickets=77)
        assert tuple(found["geometry"]) == geometry(problem, resolve(problem, "sm_90a"))
        scalars = ("softmax_scale", "output_scale", "soft_cap", "skip_softmax", "programmatic_launch")
        assert [found[name] for name in scalars] == [0.125, 2.5, 30.0, 500.0, 1]

    def test_plain_problems(self, calls: list[tuple[Any, ...]]) -> None:
        found = self.launched(paged(*cache("tuple-HND", 16, (128, 128))), calls)
        assert [found[name] for name in ("soft_cap", "skip_softmax", "programmatic_launch")] == [0.0, 0.0, 0]

    def test_a_kernel_is_compiled_with_as_many(self) -> None:
        scaled, _ = everything()
        plain = paged(*cache("tuple-HND", 16, (128, 128)))
        for problem, kinds in ((plain, [Addresses, Geometry]), (scaled, [ScaledAddresses, ScaledGeometry])):
            _, arguments = build(resolve(problem, "sm_90a"))
            assert len(arguments) == len(self.PARAMETERS)
            assert [type(argument) for argument in arguments[1:3]] == kinds

    def test_kernels_of_one_architecture_compiled_for_another(
        self, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = paged(*cache("tuple-HND", 16, (128, 128)))
        own = Plan(problem).config
        assert own == resolve(problem, "sm_90a")
        monkeypatch.setattr(plan.support, "ALSO_RUN_ON", {"sm_90a": ("sm_100a",)})
        monkeypatch.setattr(plan.support, "native_arch", lambda device: "sm_100a")
        monkeypatch.setenv("HOPWELL_KERNELS", "sm_90a")
        moved = Plan(problem).config
        assert (moved.arch, moved.target) == ("sm_90a", "sm_100a")
        assert moved == replace(own, compiled_for="sm_100a")
        assert moved.name != own.name

    @pytest.mark.parametrize("changes", [dict(batch=0), dict(max_q_len=0), dict(query=empty(0, 4, 128))], ids=str)
    def test_nothing_to_do_is_not_launched(self, changes: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
        problem = paged(*cache("tuple-HND", 16, (128, 128)), **changes)
        out = Plan(problem).execute(problem)
        assert out.shape == (problem.query.shape[0], 4, 128)
        assert not calls

    def test_the_output_is_allocated_where_there_is_none(self, calls: list[tuple[Any, ...]]) -> None:
        problem = paged(*cache("tuple-HND", 16, (192, 128)), statistics=empty(600, 4, 2, dtype=torch.float32))
        out = Plan(problem).execute(problem)
        assert (out.shape, out.dtype) == ((600, 4, 128), torch.bfloat16)
        assert Addresses(*calls[-1][1]).out == out.data_ptr()
