"""Named barriers, cluster barriers and mbarriers: phases, counts, misuse, and the deadlock report."""

from __future__ import annotations

import pytest
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import BarrierFault, Deadlock, Hazard
from hopwell.emulator.machine import machine, workers

INIT = "mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r1], {count}; bar.sync 0;\n"
WAIT = "{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], {parity}; @!%p2 bra {label};\n"


def wait(parity: int, label: str = "W") -> str:
    return WAIT.format(parity=parity, label=label)


def test_cta_barrier_orders_shared_memory():
    y = empty(128)
    run_ptx(
        "mov.u32 %r1, smem; shl.b32 %r2, %tid, 2; add.u32 %r3, %r1, %r2; st.shared.b32 [%r3], %tid; bar.sync 0;\n"
        "xor.b32 %r4, %r2, 508; add.u32 %r4, %r1, %r4; ld.shared.b32 %r5, [%r4];\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r5;",
        y, block=128, shared=512, race=True,
    )  # fmt: skip
    assert y.tolist() == list(range(127, -1, -1))


def test_named_barriers_for_part_of_the_cta():
    """Warps 0 and 1 meet at barrier 1 while warps 2 and 3 meet at barrier 2."""
    run_ptx("shr.u32 %r1, %warp, 1; add.u32 %r1, %r1, 1; bar.sync %r1, 64; bar.sync %r1, 64;", block=128)


def test_arrive_and_sync_make_a_producer_consumer_pair():
    y = empty(64)
    run_ptx(
        "mov.u32 %r1, smem; setp.eq.u32 %p1, %warp, 0; @!%p1 bra CONSUME;\n"
        "shl.b32 %r2, %lane, 2; add.u32 %r2, %r1, %r2; st.shared.b32 [%r2], %lane; bar.arrive 3, 64; bra DONE;\n"
        "CONSUME: bar.sync 3, 64; shl.b32 %r2, %lane, 2; add.u32 %r2, %r1, %r2; ld.shared.b32 %r3, [%r2];\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r3; DONE:",
        y, block=64, shared=128, race=True,
    )  # fmt: skip
    assert y.tolist()[32:] == list(range(32))


def test_reduction_survives_the_next_arrival():
    """The first warp to leave arrives again before the other has run."""
    y = empty(64)
    run_ptx(
        "setp.eq.u32 %p1, %tid, 0; barrier.red.and.pred %p3, 1, 64, %p1; bar.sync 1, 64; selp.b32 %r5, 1, 0, %p3;\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r5;",
        y, block=64,
    )  # fmt: skip
    assert y.tolist() == [0] * 64


@pytest.mark.parametrize(("how", "expected"), [("popc.u32", 20), ("and.pred", 0), ("or.pred", 1)])
def test_barrier_reductions(how, expected):
    y = empty(64)
    destination = "%r5" if how.startswith("popc") else "%p3"
    select = "" if how.startswith("popc") else "selp.b32 %r5, 1, 0, %p3;"
    run_ptx(
        f"setp.lt.u32 %p1, %tid, 20; barrier.red.{how} {destination}, 0, %p1; {select}\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r5;",
        y, block=64,
    )  # fmt: skip
    assert y.tolist() == [expected] * 64


def test_exited_warps_count_at_a_barrier_of_the_whole_cta():
    """Hardware counts exited warps as arrived when bar.sync has no thread count."""
    run_ptx("setp.eq.u32 %p1, %warp, 1; @%p1 ret; bar.sync 0;", block=96)


def test_mbarrier_phases_alternate():
    y = empty(32)
    run_ptx(
        INIT.format(count=32)
        + "mbarrier.arrive.shared.b64 _, [%r1];\n" + wait(0, "A")
        + "mbarrier.arrive.shared.b64 _, [%r1];\n" + wait(1, "B")
        + "mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 0; selp.b32 %r5, 1, 0, %p3;\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r5;",
        y, shared=16,
    )  # fmt: skip
    assert y.tolist() == [0] * 32  # phase 2 is open: parity 0 has not completed again


def test_mbarrier_state_token():
    run_ptx(
        INIT.format(count=32)
        + "mbarrier.arrive.shared.b64 %d1, [%r1];\nT: mbarrier.try_wait.shared.b64 %p2, [%r1], %d1; @!%p2 bra T;",
        shared=16,
    )


def test_transaction_bytes_hold_a_phase_open():
    run_ptx(
        INIT.format(count=1) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;\n"
        "mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 0; @%p3 trap;\n"
        "@%p1 mbarrier.complete_tx.shared::cta.b64 [%r1], 64;\n" + wait(0),
        shared=16,
    )


def test_cluster_barrier_and_remote_shared_memory():
    y = empty(4)
    run_ptx(
        "mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.b32 [%r1], %r2;\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
        "xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r4, %r1, %r3; ld.shared::cluster.b32 %r5, [%r4];\n"
        "mov.u32 %r6, %ctaid.x; mul.wide.u32 %d3, %r6, 4; add.u64 %d4, %a0, %d3; @%p1 st.global.b32 [%d4], %r5;\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        y, grid=4, cluster=2, block=64, shared=16, race=True,
    )  # fmt: skip
    assert y.tolist() == [1, 0, 1, 0]


def test_remote_arrival():
    run_ptx(
        "mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r1], 1;\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
        "mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r4, %r1, %r3;\n"
        "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];\n" + wait(0)
        + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        grid=2, cluster=2, shared=16, race=True,
    )  # fmt: skip


# ------------------------------------------------------------------ misuse
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u32 %r1, smem; mbarrier.arrive.shared.b64 _, [%r1];", "used before mbarrier.init"),
        (INIT.format(count=1) + "@%p1 mbarrier.arrive.shared.b64 _, [%r1], 2;", "2 arrivals with only 1 pending"),
        (INIT.format(count=0), "arrival count 0"),
        (
            "mov.u32 %r1, smem; @%p1 mbarrier.init.shared.b64 [%r1+4], 1; mbarrier.init.shared.b64 [%r1+4], 1;",
            "multiple of 8",
        ),
        (INIT.format(count=1) + "@%p1 st.shared.b32 [%r1], 0;", "write over the live mbarrier"),
        (
            INIT.format(count=1) + "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048576;",
            "transaction count",
        ),
        ("bar.sync 0, 48;", "not a positive multiple of 32"),
        ("bar.sync 16;", "barriers 0 to 15"),
        ("barrier.cluster.wait.aligned;", "wait without arrive"),
    ],
)
def test_misuse_is_named(body, message):
    with pytest.raises(BarrierFault, match=message):
        run_ptx(body, shared=16)


def test_conflicting_thread_counts():
    with pytest.raises(BarrierFault, match="used with 32 threads while 64 are expected"):
        run_ptx(
            "setp.eq.u32 %p1, %warp, 0; @%p1 bra ONE; bar.sync 1, 32; bra DONE; ONE: bar.sync 1, 64; DONE:", block=64
        )


def meeting_of_two(branch, other, block=64, **settings):
    """Let the first warp wait at one instruction, and the others at another."""
    body = f"@%p1 bra ONE; {other} 1, {block}; bra DONE; ONE: {branch} 1, {block}; DONE:"
    return run_ptx("setp.eq.u32 %p1, %warp, 0; " + body, block=block, **settings)


SYNC, ALIGNED = "barrier.sync", "barrier.sync.aligned"


@pytest.mark.parametrize(("branch", "other"), [("bar.sync", "bar.sync"), (SYNC, ALIGNED), (ALIGNED, SYNC)])
def test_warps_that_meet_at_two_aligned_barriers_are_a_hazard(branch, other):
    with pytest.raises(Hazard, match=r"sync: warps wait for each other at two instructions of the aligned barrier 1"):
        meeting_of_two(branch, other)  # conftest.py switches the check on
    assert len(meeting_of_two(branch, other, hazards="report").hazards) == 1
    assert not meeting_of_two(branch, other, sync=False).hazards


def test_processes_that_share_a_launch_report_their_hazards(monkeypatch):
    monkeypatch.setattr(workers, "SERIAL_SECONDS", 0)
    report = meeting_of_two("bar.sync", "bar.sync", grid=16, workers=2, hazards="report")
    assert report.workers == 2
    assert len(report.hazards) == 2


@pytest.mark.parametrize(("branch", "other"), [(SYNC, SYNC), ("bar.sync", "bar.arrive")])
def test_other_barriers_wait_anywhere(branch, other):
    meeting_of_two(branch, other, 96 if other == SYNC else 64)


def test_transaction_bytes_left_over_at_exit():
    body = INIT.format(count=1) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;"
    with pytest.raises(Hazard, match="ends with 128 bytes that were announced but never arrived"):
        run_ptx(body, shared=16)
    assert len(run_ptx(body, shared=16, sync=False).warnings) == 1


def test_deadlock_report_lists_warps_barriers_and_lines():
    with pytest.raises(Deadlock) as caught:
        run_ptx(
            INIT.format(count=2)
            + "setp.eq.u32 %p4, %warp, 1; @%p4 bra OTHER; @%p1 mbarrier.arrive.shared.b64 _, [%r1];\n"
            + wait(0)
            + "bra DONE; OTHER: bar.sync 5, 64; DONE:",
            shared=16, block=64, schedule="priority", seed=3,
        )  # fmt: skip
    text = str(caught.value)
    assert "mbarrier 0x400: phase 0, 1 of 2 arrivals pending" in text
    assert "barrier 5: 32 of 64 threads arrived" in text
    assert "warp 0: waits for mbarrier 0x400 of rank 0, parity 0" in text
    assert "warp 1: waits at barrier 5 (32 of 64 threads)" in text
    assert "mbarrier.try_wait" in text
    assert "schedule='priority', seed=3" in text


def test_polling_forever_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(machine, "PATIENCE", 200_000)
    y = empty(1)
    with pytest.raises(Deadlock, match="poll memory that no warp changes"):
        run_ptx("SPIN: ld.acquire.gpu.global.b32 %r1, [%a0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;", y)


def test_polling_warps_let_the_others_poll(monkeypatch):
    """Each of 12 CTAs waits for the one before. Long-polling warps must still get time slices."""
    monkeypatch.setattr(machine, "PATIENCE", 1_000_000)
    body = """
        mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %tid, 0; @%p1 bra DONE;
        WAIT: ld.relaxed.gpu.global.b32 %r2, [%a0]; setp.ne.u32 %p2, %r2, %r1; @%p2 bra WAIT;
        fence.acq_rel.gpu; add.u32 %r1, %r1, 1; st.release.gpu.global.b32 [%a0], %r1;
        DONE:
    """
    for seed in range(20):
        turn = empty(1)
        run_ptx(body, turn, grid=12, schedule="priority", seed=seed, resident=12)
        assert turn.tolist() == [12]
