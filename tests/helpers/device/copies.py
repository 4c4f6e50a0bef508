"""Pieces of PTX around a copy to shared memory: an mbarrier, a wait for it, a dump of the bytes, a cluster's meeting.

%r1 is the address of shared memory, %r2 of the mbarrier, %p1 holds in thread 0, %r8 is the rank in the cluster.
"""

from __future__ import annotations

SETUP = """
    mov.u32 %r1, smem; add.u32 %r2, %r1, {bar};
    setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra W;"
DUMP = """
    shl.b32 %r3, %tid, 2;
    COPY: setp.ge.u32 %p3, %r3, {bytes}; @%p3 bra COPIED;
    add.u32 %r4, %r1, %r3; ld.shared.b32 %r5, [%r4]; cvt.u64.u32 %d1, %r3; add.u64 %d2, %a1, %d1;
    st.global.b32 [%d2], %r5;
    add.u32 %r3, %r3, 128; bra COPY; COPIED:
"""
CLUSTER = (
    SETUP.format(bar=1024) + "mov.u32 %r8, %cluster_ctarank; mul.wide.u32 %d5, %r8, {size}; add.u64 %a1, %a1, %d5;\n"
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {announced}; fence.mbarrier_init.release.cluster;\n"
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
)  # fmt: skip
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
