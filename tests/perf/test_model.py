"""The performance model: loops in code, their work, their time, and the prediction for a shape."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.emulator.ptx import parse_module
from hopwell.kernels.jit.toolchain import artifact
from hopwell.perf import commands as command
from hopwell.perf import model_report
from hopwell.perf.blackwell_rates import B200
from hopwell.perf.kernel_work import product, ptx_results, skipped, work
from hopwell.perf.loops import around, innermost, natural_loops
from hopwell.perf.model import (
    KernelModel,
    WorkTile,
    cases,
    compiled,
    config_of,
    kernel_model,
    predict,
    work_tiles,
)
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.sass import Sass, Timing, issue_times, parse, sass_loops
from hopwell.perf.steps import ALU, CHAIN, CONVERSION, FMA, L2, LOAD_CHAIN, MMA, MUFU, SHARED, Mma, StepTime

PTX = """
.version 9.0
.target sm_100a
.visible .entry kernel()
{
    .reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<3>;
outer:
    ex2.approx.ftz.f32 %r1, %r2;
inner:
    max.f32 %r1, %r2, %r3;
    fma.rn.f32x2 %d1, %d1, %d2, %d3;
    add.f32 %r1, %r2, %r3;
    add.s32 %r4, %r4, 1;
    cvt.rn.bf16x2.f32 %r5, %r1, %r2;
    cvt.u32.u64 %r5, %d1;
    @%p1 bra inner;
    @%p2 bra past;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r8];
past:
    @%p2 bra outer;
    { .reg .b64 a, b; tcgen05.mma.cta_group::1.kind::f16 [%r1], a, b, 136316048, %p1; }
    { .reg .b64 a, b; tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2 + 8], b, 135332880, %p1; }
    ret;
}
"""

# Output of nvdisasm -hex, shortened. The first control word: 4 cycles of stall, scoreboard 0 for both ends.
LISTING = """
.L_x_1:
        /*0000*/                   MUFU.EX2 R1, R1 ;            /* 0x0000000100017308 */
                                                                /* 0x0000080000000000 */
        /*0010*/                   STL [R1+0x4], R5             (*"SpillRefill"*); /* 0x0000000100017308 */
                                                                /* 0x00100e2000000000 */
        /*0020*/              @!P0 BRA `(.L_x_2) ;              /* 0x0000000100017308 */
                                                                /* 0x000fc20000000000 */
        /*0030*/                   BRA.U UP0, `(.L_x_1) ;       /* 0x0000000100017308 */
                                                                /* 0x000fc20000000000 */
        /*0040*/                   EXIT ;                       /* 0x0000000100017308 */
                                                                /* 0x000fc20000000000 */
.L_x_2:
        /*0050*/                   BRA `(.L_x_1) ;              /* 0x0000000100017308 */
                                                                /* 0x000fc20000000000 */
"""


def test_loops_nest() -> None:
    outer_and_inner = [[1], [2], [3, 2], [4, 1], []]
    inner, outer = natural_loops(outer_and_inner)
    assert (inner.path, outer.path) == ([2], [1, 2, 3])
    assert around([inner, outer], inner) == outer
    assert around([inner, outer], outer) is None
    assert outer.without(inner) == [1, 3]
    assert innermost([inner, outer], lambda loop: True) == [inner]


def test_retries_behind_a_loop_are_not_in_its_path() -> None:
    (loop,) = natural_loops([[1], [2, 4], [3, 0], [], [2]])
    assert loop.body == {0, 1, 2, 4}
    assert loop.path == [0, 1, 2]


def test_what_ptx_does() -> None:
    (kernel,) = parse_module(PTX).values()
    body = kernel.instrs[1:8]
    assert ptx_results(body) == {ALU: 2, FMA: 3, CONVERSION: 1}
    assert ptx_results(kernel.instrs[:1]) == {MUFU: 1}
    assert skipped(range(11), kernel.instrs, "tcgen05.ld") == {9}
    shared, tensor = (product(one) for one in kernel.instrs if one.op.startswith("tcgen05.mma"))
    assert shared == Mma(1, 128, 128)
    assert tensor == Mma(1, 128, 64, a_in_tensor_memory=True)
    assert (shared.shared_bytes, tensor.shared_bytes) == (8192, 2048)


def test_machine_code() -> None:
    code = parse(LISTING)
    assert [one.op for one in code] == ["MUFU.EX2", "STL", "BRA", "BRA.U", "EXIT", "BRA"]
    assert [one.target for one in code] == [-1, -1, 5, 0, -1, 0]
    assert [one.falls_through for one in code] == [True, True, True, True, False, False]
    assert (code[0].stall, code[0].sets, code[0].reads, code[0].waits) == (4, 0, 0, [])
    (loop,) = sass_loops(code)
    assert loop.path == [0, 1, 2, 3, 5]


def control(stall: int, sets: int = 7, waits: int = 0) -> int:
    return stall | sets << 5 | 7 << 8 | waits << 11


def test_a_warp_waits_for_stalls_scoreboards_and_units() -> None:
    code = [
        Sass("MUFU.EX2 R1, R1", control(1, sets=0)),
        Sass("MUFU.EX2 R2, R2", control(1, sets=1)),
        Sass("FADD R3, R3, R3", control(5)),
        Sass("FADD R1, R1, R1", control(1, waits=1 << 0)),
        Sass("FADD R2, R2, R2", control(1, waits=1 << 1)),
    ]
    times = issue_times(code, {"MUFU": Timing(latency=20, busy=8)}, Timing(latency=10))
    assert times == [0, 8, 9, 20, 28]


def shape(q_len: int, kv_len: int, causal: bool, heads: int = 1) -> Prefill:
    return Prefill("one", "one request", (q_len,), (kv_len,), heads, 1, 128, 128, causal=causal)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (256, 256), (700, 700), (300, 1000), (512, 513)])
@pytest.mark.parametrize("keys", [96, 128])
def test_work_tiles_visit_what_rows_see(q_len: int, kv_len: int, keys: int) -> None:
    expected = []
    for first in range(0, q_len, 256):
        ends = [kv_len - q_len + row + 1 for row in range(first, min(first + 256, q_len))]
        steps = math.ceil(ends[-1] / keys)
        seen_by_all = [step for step in range(steps - 1) if (step + 1) * keys <= ends[0]]
        expected.append(WorkTile(steps - len(seen_by_all), len(seen_by_all)))
    assert list(work_tiles(shape(q_len, kv_len, causal=True), 256, keys, 1)) == expected[::-1]


def test_all_tiles_of_a_section_come_before_the_next_ones() -> None:
    tiles = [(each.masked, each.full) for each in work_tiles(shape(512, 512, causal=True, heads=4), 256, 128, 2)]
    assert tiles == [(2, 2), (2, 2), (2, 0), (2, 0)] * 2


def test_the_last_tile_of_keys_is_masked_without_a_mask() -> None:
    assert list(work_tiles(shape(256, 1024, causal=False, heads=2), 256, 128, 2)) == [WorkTile(1, 7)] * 2


def test_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="windows"):
        list(work_tiles(replace(shape(256, 256, causal=True), window_left=5), 256, 128, 1))


def test_prediction() -> None:
    """Three work tiles have 8 steps each, on two SMs: one SM has two, and the other SM is idle for half of
    that time.
    """
    rates = replace(B200, sms=2, launch=1000)
    steady, masked = StepTime({"MMA": 2048.0}), StepTime({"MMA": 3072.0})
    kernel = KernelModel(steady, masked, mma=2048.0, drain=100.0, q_wait=10.0, store=1.0, keys=128)
    case = shape(256, 1024, causal=False, heads=3)
    found = predict(case, kernel, rates)
    tile = 7 * 2048 + 3072 + 111
    assert found.seconds == pytest.approx((2 * tile + 1000) / rates.clock)
    assert found.balance == pytest.approx(3 / 4)
    assert found.visible == pytest.approx(1.0)
    lost = (found.visible, found.tensor_cores, found.in_steps, found.balance, found.launch)
    assert found.fraction == pytest.approx(math.prod(lost))
    assert found.tflops == pytest.approx(case.work / found.seconds / 1e12)


def test_cases_and_configs() -> None:
    chosen = cases()
    assert {"P1", "P6", "P7", "P1-fp8"} <= {case.name for case in chosen}
    config = config_of(chosen[0], "sm_100a")
    assert config is not None
    assert config.name == "prefill_sm_100a_tcgen05_bf16_d128_causal_contiguous"
    assert (
        config_of(shape(256, 256, causal=True).__class__(*["none"] * 2, (1,), (1,), 1, 1, 512, 512), "sm_100a") is None
    )
    with pytest.raises(ValueError, match="sm_90a"):
        config_of(chosen[0], "sm_90a")


def test_the_command_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_report, "report", lambda arch: f"tables of {arch}\n")
    done = CliRunner().invoke(command.app, ["model", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model.md").read_text() == "tables of sm_100a\n"


@pytest.mark.compile
def test_a_compiled_kernel() -> None:
    p1, *_ = cases()
    config = config_of(p1, "sm_100a")
    assert config is not None
    kernel = kernel_model(compiled(work(config, artifact(config)), config, B200), B200)
    units = kernel.steady.units
    # Four products of 128 x 128 x 128; their operands, the arriving K and V, and factors, at 0.82 of 128 bytes a cycle.
    assert (kernel.mma, units[MMA]) == (2048, pytest.approx(16 * (64.6 + 64.5)))
    assert units[SHARED] == pytest.approx((2 * 3 * 256 + 512 + 16) / 0.82)
    assert units[L2] == 65536 / B200.l2_bytes
    assert units[MUFU] == (128 * (8 - config.polynomial_eighths) / 8 + 2) * 256 / 16
    assert units[CHAIN] > 1024
    assert kernel.masked.cycles >= kernel.steady.cycles >= kernel.mma
    assert 0.5 < predict(p1, kernel).fraction < 1


@pytest.mark.compile
@pytest.mark.parametrize(("name", "loaded", "filled", "read"), [("P1-fp8-cache", 8, 8, 8), ("P1-nvfp4-cache", 4, 8, 4)])
def test_a_compiled_kernel_that_dequantizes(name: str, loaded: int, filled: int, read: int) -> None:
    """Bits of an element of K and V: loaded by TMA, filled in shared memory, and read there. 16 bits are written."""
    case = next(case for case in cases() if case.name == name)
    config = config_of(case, "sm_100a")
    assert config is not None
    does = work(config, artifact(config))
    kernel = kernel_model(compiled(does, config, B200), B200)
    elements = 2 * 128 * 128
    assert does.loaded_bytes == elements * loaded // 8
    assert does.dequantized_bytes == elements * (read + 16) // 8
    bits = filled + read + 16
    assert kernel.steady.units[SHARED] == pytest.approx((2 * 3 * 256 + elements * bits / 8 / 128 + 16) / 0.82)
    assert kernel.steady.units[LOAD_CHAIN] > 500
    assert does.dequantization is not None
    assert 500 < len(does.dequantization.code) < 1000
    assert 0.5 < predict(case, kernel).fraction < 0.75
