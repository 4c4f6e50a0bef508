"""Atomics and strong accesses in shared memory under the race detector and the proxy check.

PTX ISA, "data races": two strong accesses do not race, a strong and a weak one do unless something orders them.
"""

from __future__ import annotations

import pytest
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Hazard

ZERO = "mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.b32 [%r1], 0; bar.sync 0;\n"
# The maximum of all warps in every round, as in an online softmax whose warps share row maxima.
ROUND = "atom.relaxed.cta.shared.max.u32 %r5, [%r1], %r4; bar.sync 0; ld.shared.b32 %r6, [%r1];\n"


def rounds(between: str, schedule: str = "eager") -> list[int]:
    out = empty(64)
    body = (
        ZERO + "add.u32 %r4, %warp, 10;\n" + ROUND + between + "add.u32 %r4, %r4, 100;\n" + ROUND
        + "mul.wide.u32 %d1, %tid, 4; add.u64 %d1, %a0, %d1; st.global.b32 [%d1], %r6;"
    )  # fmt: skip
    run_ptx(body, out, block=64, shared=16, race=True, schedule=schedule)
    return out.tolist()


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_a_read_and_the_next_round_of_atomics(schedule):
    """A barrier between the atomics and the reads does not order the reads before the next atomics."""
    assert rounds("bar.sync 0;\n", schedule) == [111] * 64
    with pytest.raises(Hazard, match=r"atom\.relaxed") as caught:
        rounds("", schedule)
    assert "write is not ordered after read" in str(caught.value) or "read is not ordered after write" in str(
        caught.value
    )


def test_a_read_before_the_atomics_of_all_warps():
    """The reader has seen a barrier with warp 1, whose atomic ran last, and none with warp 2."""
    body = (
        "{zero} setp.eq.u32 %p2, %warp, 2; @%p2 bra TWO; setp.eq.u32 %p3, %warp, 1; @!%p3 bra ZERO;\n"
        "atom.shared.add.u32 %r5, [%r1], 1; barrier.sync 1, 64; bra DONE;\n"
        "TWO: atom.shared.add.u32 %r5, [%r1], 1; {two} bra DONE;\n"
        "ZERO: barrier.sync 1, 64; {two} ld.shared.b32 %r6, [%r1]; DONE:"
    )
    run_ptx(body.format(zero=ZERO, two="barrier.sync 2, 64;"), block=96, shared=16, race=True)
    with pytest.raises(Hazard, match=r"atom\.shared\.add"):
        run_ptx(body.format(zero=ZERO, two=""), block=96, shared=16, race=True)


def test_a_weak_store_races_with_an_atomic():
    body = ZERO + "setp.eq.u32 %p2, %warp, 0; @%p2 red.shared.add.u32 [%r1], 1; {meet} @!%p2 st.shared.b32 [%r1], 5;"
    run_ptx(body.format(meet="bar.sync 0;"), block=64, shared=16, race=True)
    with pytest.raises(Hazard, match="write is not ordered after write"):
        run_ptx(body.format(meet=""), block=64, shared=16, race=True)


HAND_OVER = (
    ZERO + "setp.eq.u32 %p2, %warp, 0; @!%p2 bra CONSUME;\n"
    "@%p1 st.shared.b32 [%r1+4], 7; @%p1 {release} bra DONE;\n"
    "CONSUME: {acquire} ld.shared.b32 %r6, [%r1+4]; DONE:"
)
POLL = "P: ld.{sem}.cta.shared.b32 %r5, [%r1]; setp.eq.u32 %p3, %r5, 0; @%p3 bra P;"


@pytest.mark.parametrize("release", ["red.release.cta.shared.add.u32", "st.release.cta.shared.b32"])
def test_release_and_acquire_order_other_accesses(release):
    settings = {"block": 64, "shared": 16, "race": True}
    text = f"{release} [%r1], 1;"
    run_ptx(HAND_OVER.format(release=text, acquire=POLL.format(sem="acquire")), **settings)
    with pytest.raises(Hazard, match="read is not ordered after write"):
        run_ptx(
            HAND_OVER.format(release=text.replace("release", "relaxed"), acquire=POLL.format(sem="acquire")), **settings
        )
    with pytest.raises(Hazard, match="read is not ordered after write"):
        run_ptx(HAND_OVER.format(release=text, acquire=POLL.format(sem="relaxed")), **settings)


def test_an_asynchronous_read_of_an_atomic_needs_a_proxy_fence():
    out = empty(4)
    body = (
        ZERO + "red.shared.add.u32 [%r1], 1; {fence} bar.sync 0;\n"
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 16;\n"
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    )
    run_ptx(body.format(fence="fence.proxy.async.shared::cta;"), out, block=64, shared=16, race=True, proxy=True)
    assert out[0] == 64
    with pytest.raises(Hazard, match="proxy: asynchronous read"):
        run_ptx(body.format(fence=""), out, block=64, shared=16, race=True, proxy=True)
