"""tcgen05.fence: what the race detector asks of threads that hand tensor memory to each other.

PTX ISA, "memory consistency model for 5th generation of TensorCore operations", canonical synchronization patterns.
Strict mode asks for the fences of these patterns. Without it, an arrival with release and a wait with acquire order
completed accesses, because the standard mechanisms of the memory model apply too.
"""

from __future__ import annotations

import pytest
from helpers.device.ptx import run_ptx

from hopwell.emulator import Hazard

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
STRICT = {"race": True, "strict": True}
# Warp 0 stores, warp 1 shifts 8 columns with the tensor core, and warp 0 loads them. %r1 is the first of two mbarriers.
HAND_OVER = """
    mov.u32 %r1, smem; add.u32 %r2, %r1, 8; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %warp, 0; mov.u32 %r9, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; @%p1 mbarrier.init.shared.b64 [%r2], 1; add.u32 %r4, %r1, 16;
    @!%p2 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;
    ALLOCATED: bar.sync 0; ld.shared.b32 %r3, [%r4]; setp.eq.u32 %p4, %lane, 0;
    @!%p2 bra SHIFT;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3], {{%r9, %r9, %r9, %r9, %r9, %r9, %r9, %r9}};
    {wait_store} {before_arrive} {arrive}
    {wait_result} {after_result}
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
    bra DONE;
    SHIFT: {wait_store_arrival} {after_arrival}
    @%p4 tcgen05.shift.cta_group::1.down [%r3];
    {signal}
    DONE:
"""
PARTS = {
    "wait_store": "tcgen05.wait::st.sync.aligned;",
    "before_arrive": BEFORE,
    "arrive": "bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r1];",
    "wait_store_arrival": "A: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0; @!%p3 bra A;",
    "after_arrival": AFTER,
    "signal": "@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];",
    "wait_result": "B: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @!%p3 bra B;",
    "after_result": AFTER,
}
RELAXED = {
    "arrive": PARTS["arrive"].replace("arrive.shared", "arrive.relaxed.cluster.shared"),
    "wait_store_arrival": PARTS["wait_store_arrival"].replace("parity.shared", "parity.relaxed.cluster.shared"),
    "wait_result": PARTS["wait_result"].replace("parity.shared", "parity.relaxed.cluster.shared"),
}
NAMED = {"arrive": "bar.sync 1, 64;", "wait_store_arrival": "bar.sync 1, 64;"}
LONE = {"before_arrive": f"@%p4 {BEFORE}"}  # each lane has stored, and one of them fences


def hand_over(settings: dict, **parts: str) -> None:
    run_ptx(HAND_OVER.format(**{**PARTS, **parts}), block=64, shared=32, target="sm_100a", sync=False, **settings)


@pytest.mark.parametrize("barriers", [{}, RELAXED, NAMED], ids=["mbarrier", "relaxed", "named"])
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_the_canonical_pattern(barriers, schedule):
    hand_over({**STRICT, "schedule": schedule}, **barriers)


@pytest.mark.parametrize("barriers", [{}, NAMED], ids=["mbarrier", "named"])
@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        ({"before_arrive": ""}, "write after write, but no tcgen05.fence::before_thread_sync follows"),
        (LONE, "write after write, but no tcgen05.fence::before_thread_sync follows"),
        ({"after_arrival": ""}, "write after write, but no tcgen05.fence::after_thread_sync precedes"),
        ({"after_result": ""}, "read after write, but no tcgen05.fence::after_thread_sync precedes"),
        ({"after_result": f"@%p4 {AFTER}"}, "read after write, but no tcgen05.fence::after_thread_sync precedes"),
    ],
    ids=["before", "before, by one lane", "after", "after the commit", "after the commit, by one lane"],
)
def test_a_missing_fence(barriers, dropped, message):
    with pytest.raises(Hazard, match=f"fence: barriers order {message}"):
        hand_over(STRICT, **{**barriers, **dropped})


def test_fences_do_not_replace_the_wait_for_a_store():
    with pytest.raises(Hazard, match="race: write is not ordered after write"):
        hand_over(STRICT, wait_store="")


def test_an_arrival_is_no_commit():
    """The arrival of the thread that issues a product does not wait for the product."""
    with pytest.raises(Hazard, match="race: read is not ordered after write"):
        hand_over(STRICT, signal=f"{BEFORE} @%p4 mbarrier.arrive.shared.b64 _, [%r2];")


UNFENCED = {"before_arrive": "", "after_arrival": "", "after_result": ""}


@pytest.mark.parametrize("barriers", [{}, NAMED], ids=["mbarrier", "named"])
def test_release_and_acquire_are_enough_outside_of_strict_mode(barriers):
    hand_over({"race": True}, **{**UNFENCED, **barriers})
    with pytest.raises(Hazard, match="race: write is not ordered after write"):
        hand_over({"race": True}, **{**UNFENCED, **barriers, "wait_store": ""})


@pytest.mark.parametrize("dropped", [{"before_arrive": ""}, {"after_arrival": ""}, {"after_result": ""}])
def test_relaxed_barriers_need_the_fences_in_every_mode(dropped):
    with pytest.raises(Hazard, match=r"race: (read|write) is not ordered after write"):
        hand_over({"race": True}, **{**RELAXED, **dropped})
    released = RELAXED["arrive"].replace("@%p1", "@%p1 fence.release.sync_restrict::shared::cta.cluster; @%p1")
    acquire = "fence.acquire.sync_restrict::shared::cluster.cluster;"
    waits = {name: RELAXED[name] + acquire for name in ("wait_store_arrival", "wait_result")}
    with pytest.raises(Hazard, match="fence: barriers order"):
        hand_over({"race": True}, **{**RELAXED, "arrive": released, **waits, **dropped})


def test_fences_compose_across_a_third_thread():
    """Warp 2 passes the arrival on and touches no tensor memory, so it needs no fence."""
    text = HAND_OVER.format(**{**PARTS, "arrive": "bar.sync 1, 64;", "wait_store_arrival": "bar.sync 2, 64;"})
    text = text.replace("@!%p2 bra SHIFT;", "setp.eq.u32 %p5, %warp, 2; @%p5 bra RELAY; @!%p2 bra SHIFT;")
    text = text.replace("    DONE:", "bra DONE; RELAY: bar.sync 1, 64; bar.sync 2, 64; DONE:")
    run_ptx(text, block=96, shared=32, target="sm_100a", sync=False, **STRICT)


def test_columns_are_freed_after_every_access():
    """The other warp loads what it has shifted; only a barrier orders that before tcgen05.dealloc."""
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r5]; tcgen05.wait::ld.sync.aligned;"
    both = "add.u32 %r5, %r3, 0x200000; " + PARTS["signal"] + load
    with pytest.raises(Hazard, match=r"race: (read|write) is not ordered after (read|write)"):
        hand_over({"race": True}, signal=both)
    text = HAND_OVER.replace("tcgen05.relinquish", "bar.sync 3, 64; tcgen05.relinquish")
    run_ptx(text.format(**{**PARTS, "signal": both + "bar.sync 3, 64;"}), block=64, shared=32, target="sm_100a",
            sync=False, race=True)  # fmt: skip


def test_a_use_of_the_registers_is_no_wait_for_the_load():
    """A move may come before tcgen05.wait::ld. The load may still come after the later store."""
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r3]; mov.b32 %r21, %r20; "
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r9}; tcgen05.wait::st.sync.aligned;"
    hand_over(STRICT, before_arrive=load + "tcgen05.wait::ld.sync.aligned; " + store + BEFORE)
    with pytest.raises(Hazard, match="race: write is not ordered after read"):
        hand_over(STRICT, before_arrive=load + store + BEFORE)
