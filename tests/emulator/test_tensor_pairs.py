"""Rules of the PTX ISA for CTA pairs and clusters: one .cta_group, allocation by pairs, exits of CTAs."""

from __future__ import annotations

import pytest
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Deadlock, EmulatorError, Hazard, MemoryFault, Unsupported

MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
INIT = (
    "mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %r2, 0;\n"
    "mapa.shared::cluster.u32 %r3, %r1, 1; @%p1 mbarrier.init.shared.b64 [%r1], 1;\n"
    "fence.mbarrier_init.release.cluster; bar.warp.sync -1; setp.eq.and.u32 %p3, %r2, 0, %p1;" + MEET
)
# Longer than a time slice, so that the peer goes on before this CTA exits.
DELAY = "mov.u32 %r20, 0; DELAY: add.u32 %r20, %r20, 1; setp.lt.u32 %p9, %r20, 3000; @%p9 bra DELAY;\n"
WAIT = "@%p2 bra LEAVE; WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0; @!%p4 bra WAIT; LEAVE:\n"


def run_pair(body: str, *args, **settings):
    return run_ptx(
        body, *args, grid=2, cluster=2, shared=256, target="sm_100a", **{"race": True, "proxy": True, **settings}
    )


# ------------------------------------------------------------------ .cta_group
def test_one_cta_group_in_a_kernel():
    """ptxas 13.0 refuses the kernel."""
    body = "bra DONE; tcgen05.relinquish_alloc_permit.cta_group::{}.sync.aligned;"
    run_pair(body.format(2) + body.format(2) + "DONE:")
    with pytest.raises(EmulatorError, match=r"(?s)have one .cta_group; this one has two.*group::2.*group::1"):
        run_pair(body.format(2) + body.format(1) + "DONE:")


@pytest.mark.parametrize(("target", "refused"), [("sm_100a", False), ("sm_103a", True)])
def test_products_of_integers_by_target(target, refused):
    body = "mov.u32 %r9, 0; mov.b64 %d1, 0; tcgen05.mma.cta_group::1.kind::i8 [%r9], %d1, %d1, %r9, 0;"
    with pytest.raises(EmulatorError, match="has no kind::i8" if refused else "issued by 32 lanes") as caught:
        run_ptx(body, target=target)
    assert isinstance(caught.value, Unsupported) == refused


# ------------------------------------------------------------------ allocation
ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], {};\n"
FREE = "ld.shared.b32 %r4, [%r1]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, {};\n"
PAIR = "mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p2, %r2, 0; mov.u32 %r5, 32;\n"


def test_a_pair_allocates_together():
    run_pair(PAIR + ALLOC.format("%r5") + FREE.format("%r5"))
    with pytest.raises(MemoryFault, match=r"alloc of (32|64) columns with .cta_group::2 meets tcgen05.alloc of"):
        run_pair(PAIR + "@%p2 mov.u32 %r5, 64;" + ALLOC.format("%r5") + FREE.format("%r5"))


def test_one_cta_of_a_pair_allocates():
    with pytest.raises(Deadlock, match=r"tcgen05.alloc of 32 columns by the peer CTA"):
        run_pair(PAIR + "@!%p2 bra DONE;" + ALLOC.format(32) + FREE.format(32) + "DONE:")


def test_one_cta_of_a_pair_frees():
    with pytest.raises(Deadlock, match=r"tcgen05.dealloc of 32 columns by the peer CTA"):
        run_pair(PAIR + ALLOC.format(32) + "@!%p2 bra DONE;" + FREE.format(32) + "DONE:")


# ------------------------------------------------------------------ exits
REMOTE = {
    "arrive": "@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];",
    "commit": "@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];",
    "copy": "@%p3 mapa.shared::cluster.u32 %r6, %r1, 1; add.u32 %r7, %r6, 128; add.u32 %r8, %r1, 64;\n"
    "fence.proxy.async; setp.eq.and.u32 %p5, %r2, 1, %p1; @%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;\n"
    "@%p3 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r8], 16, [%r6];",
}


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_a_cta_waits_for_what_its_peer_sends(kind, schedule):
    """The second CTA learns of the arrival by its mbarrier. Only without the wait may it exit before."""
    run_pair(INIT + REMOTE[kind] + WAIT, schedule=schedule)
    if schedule == "eager":
        with pytest.raises(Hazard, match="exit: the CTA of rank 1 may exit before work of"):
            run_pair(INIT + REMOTE[kind] + DELAY)


@pytest.mark.parametrize(("kind", "enough"), [("arrive", True), ("commit", False), ("copy", False)])
def test_a_cluster_barrier_covers_only_what_the_peer_has_done_itself(kind, enough):
    if enough:
        run_pair(INIT + REMOTE[kind] + MEET)
    else:
        with pytest.raises(Hazard, match="exit: the CTA of rank 1 may exit before work of"):
            run_pair(INIT + REMOTE[kind] + MEET)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_commit_to_both_ctas_arrives_at_one_first(alone):
    """A CTA does not learn of its own arrival from the other CTA, which has waited for the one there."""
    commit = "mov.b16 %h1, 3; @%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster"
    body = INIT + commit + ".b64 [%r1], %h1;" + WAIT.replace("@%p2 bra LEAVE; ", "{}") + MEET
    run_pair(body.format(""))
    skip = f"setp.eq.u32 %p5, %r2, {alone}; @!%p5 bra LEAVE; "
    with pytest.raises(Hazard, match=f"exit: the CTA of rank {1 - alone} may exit before work of tcgen05.commit"):
        run_pair(body.format(skip))


def test_a_cta_whose_shared_memory_is_read():
    out = empty(32)
    read = "@!%p2 bra READ; ld.shared::cluster.b32 %r9, [%r3]; READ: "
    run_pair(INIT + read + MEET, out)
    with pytest.raises(Hazard, match="exit: the CTA of rank 1 may exit before work of"):
        run_pair(INIT + read + DELAY, out)


def test_products_of_a_pair_end_before_the_peer_exits():
    """tcgen05.shift stands for a product. A commit to both CTAs tells the peer."""
    alloc = "add.u32 %r10, %r1, 64;" + ALLOC.format(32).replace("%r1", "%r10") + "ld.shared.b32 %r14, [%r10];"
    free = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r14, 32;"
    shift = "mov.b16 %h1, 3; @%p3 tcgen05.shift.cta_group::2.down [%r14];"
    commit = "@%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster{} [%r1]{};"
    both = commit.format(".multicast::cluster.b64", ", %h1")
    wait = WAIT.replace("@%p2 bra LEAVE; ", "")
    run_pair(INIT + alloc + shift + both + wait + MEET + free)
    own = commit.format(".b64", "") + WAIT.replace("@%p2", "@!%p2")
    with pytest.raises(Hazard, match=r"(?s)exit: the CTA of rank 1 may exit before work of tensor core.*tcgen05.shift"):
        run_pair(INIT + alloc + shift + own + free)
