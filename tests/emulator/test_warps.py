"""Warp-wide instructions, divergence and reconvergence."""

from __future__ import annotations

import pytest
import torch
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Deadlock, EmulatorError

STORE = "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r50;"


def lanes(body: str, block: int = 32, **settings) -> list[int]:
    """Return each thread's value of %r50."""
    y = empty(block)
    run_ptx(body + STORE, y, block=block, **settings)
    return y.tolist()


@pytest.mark.parametrize(
    ("mode", "operand", "clamp", "source"),
    [
        ("up", 3, 0, lambda n: n - 3 if n >= 3 else n),
        ("down", 5, 31, lambda n: n + 5 if n + 5 < 32 else n),
        ("bfly", 9, 31, lambda n: n ^ 9),
        ("idx", 7, 31, lambda n: 7),
        ("idx", 2, (24 << 8) | 31, lambda n: (n & 24) | 2),  # segments of eight lanes
        ("bfly", 4, (28 << 8) | 31, lambda n: n ^ 4 if n & 4 else n),  # past the segment's last lane: the own value
        ("up", 1, 28 << 8, lambda n: n - 1 if n % 4 else n),
    ],
)
def test_shuffle(mode, operand, clamp, source):
    got = lanes(f"mul.lo.u32 %r1, %tid, 10; shfl.sync.{mode}.b32 %r50, %r1, {operand}, {clamp}, -1;")
    assert got == [10 * source(n) for n in range(32)]


def test_shuffle_predicate_says_whether_the_source_is_in_range():
    got = lanes("shfl.sync.down.b32 %r1|%p1, %tid, 30, 31, -1; selp.b32 %r50, 1, 0, %p1;")
    assert got == [1, 1] + [0] * 30


def test_shuffle_from_a_lane_that_does_not_take_part():
    with pytest.raises(EmulatorError, match="reads lane 0"):
        lanes("setp.gt.u32 %p1, %tid, 15; @!%p1 bra DONE; shfl.sync.idx.b32 %r50, %tid, 0, 31, 0xFFFF0000; DONE:")


def test_votes_and_ballot():
    got = lanes("setp.lt.u32 %p1, %tid, 5; vote.sync.ballot.b32 %r50, %p1, -1;")
    assert got == [31] * 32
    got = lanes("setp.lt.u32 %p1, %tid, 5; vote.sync.any.pred %p2, !%p1, -1; selp.b32 %r50, 1, 0, %p2;")
    assert got == [1] * 32
    got = lanes("setp.lt.u32 %p1, %tid, 32; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r50, 1, 0, %p2;")
    assert got == [1] * 32


def test_redux_match_and_activemask():
    assert lanes("redux.sync.add.s32 %r50, %tid, -1;") == [496] * 32
    assert lanes("redux.sync.max.u32 %r50, %tid, -1;") == [31] * 32
    got = lanes("and.b32 %r1, %tid, 3; match.any.sync.b32 %r50, %r1, -1;")
    assert [g & 0xFFFFFFFF for g in got] == [0x11111111 << (n & 3) for n in range(32)]
    got = lanes("mov.u32 %r50, 0; setp.lt.u32 %p1, %tid, 3; @%p1 activemask.b32 %r50;")
    assert got == [7] * 3 + [0] * 29


def test_elect_chooses_one_lane():
    assert lanes("elect.sync %r50|%p1, -1; selp.b32 %r50, 1, 0, %p1;") == [1] + [0] * 31
    got = lanes(
        "mov.u32 %r50, 0; setp.lt.u32 %p2, %tid, 4; @%p2 bra DONE; elect.sync _|%p1, 0xFFFFFFF0;\n"
        "selp.b32 %r50, 1, 0, %p1; DONE:"
    )
    assert got == [0] * 4 + [1] + [0] * 27


def test_loops_with_different_trip_counts_converge():
    """Lane n counts to n; the shuffle after the loop needs all lanes together."""
    got = lanes(
        "mov.u32 %r1, 0; LOOP: setp.ge.u32 %p1, %r1, %tid; @%p1 bra OUT; add.u32 %r1, %r1, 1; bra LOOP;\n"
        "OUT: shfl.sync.bfly.b32 %r50, %r1, 31, 31, -1;"
    )
    assert got == list(range(31, -1, -1))


def test_nested_divergence():
    got = lanes(
        "mov.u32 %r50, 0; and.b32 %r1, %tid, 1; and.b32 %r2, %tid, 2; setp.ne.u32 %p1, %r1, 0;\n"
        "setp.ne.u32 %p2, %r2, 0;\n"
        "@%p1 bra ODD; @%p2 bra TWO; mov.u32 %r50, 10; bra JOIN; TWO: mov.u32 %r50, 12; bra JOIN;\n"
        "ODD: @%p2 bra THREE; mov.u32 %r50, 11; bra JOIN; THREE: mov.u32 %r50, 13; JOIN: bar.warp.sync -1;"
    )
    assert got == [10 + n % 4 for n in range(32)]


def test_exited_lanes_are_not_waited_for():
    y = empty(32)
    run_ptx("setp.gt.u32 %p1, %tid, 7; @%p1 ret; bar.warp.sync -1; mov.u32 %r50, 1; bar.sync 0;" + STORE, y)
    assert y.tolist() == [1] * 8 + [0] * 24


def test_lanes_polling_for_other_lanes_of_their_warp_make_progress():
    """Lane 0 spins on a flag that lane 1 sets later in program order: independent thread scheduling must run lane 1."""
    y = empty(32)
    run_ptx(
        "setp.eq.u32 %p1, %tid, 0; mov.u32 %r50, 1; @!%p1 bra SET;\n"
        "SPIN: ld.volatile.global.b32 %r1, [%a0+124]; setp.eq.u32 %p2, %r1, 0; @%p2 bra SPIN; bra DONE;\n"
        "SET: " + STORE + " DONE:",
        y,
    )  # fmt: skip
    assert y.tolist()[1:] == [1] * 31


def test_movmatrix_transposes():
    got = lanes("movmatrix.sync.aligned.m8n8.trans.b16 %r50, %tid;")
    x = torch.arange(32, dtype=torch.int32).view(torch.int16).view(8, 8)
    assert got == x.t().contiguous().view(torch.int32).view(-1).tolist()


def test_partial_last_warp():
    assert lanes("activemask.b32 %r50;", block=40)[32:] == [0xFF] * 8


def test_a_missing_lane_is_a_deadlock_that_names_it():
    with pytest.raises(Deadlock, match="waits for lanes 0x0000ffff of its warp"):
        lanes(
            "mov.u32 %r1, smem; mbarrier.init.shared.b64 [%r1], 1; setp.lt.u32 %p1, %tid, 16; @!%p1 bra HALF;\n"
            "FOREVER: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra FOREVER;\nHALF: bar.warp.sync -1;",
            shared=64,
        )


@pytest.mark.parametrize(("change", "fits"), [("dec", 128), ("dec", 40), ("inc", 128), ("inc", 160)])
def test_register_budgets_change_in_their_direction_only(change, fits):
    """512 threads of an SM start with 128 registers each.

    On an H200, setmaxnreg in the other direction is an illegal instruction.
    """
    wrong = {"dec": 136, "inc": 120}[change]
    for block, directives in ((512, ".reqntid 512, 1, 1"), (256, ".reqntid 256, 1, 1 .minnctapersm 2")):
        run_ptx(f"setmaxnreg.{change}.sync.aligned.u32 {fits};", block=block, directives=directives)
        with pytest.raises(EmulatorError, match="start with 128 registers"):
            run_ptx(f"setmaxnreg.{change}.sync.aligned.u32 {wrong};", block=block, directives=directives)


def test_ptxas_decides_where_all_registers_of_an_sm_are_more_than_threads_can_have():
    run_ptx("setmaxnreg.inc.sync.aligned.u32 232;", block=160, directives=".reqntid 160, 1, 1")
