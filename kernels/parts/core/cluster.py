"""Clusters of CTAs: ranks, access to the shared memory of other CTAs, and rings whose stages two CTAs fill together."""

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.config.base import CTAS
from hopwell.kernels.parts.core.device import device_struct, ptx, shared_address
from hopwell.kernels.parts.core.pipeline import Ring


def rank() -> Int32:
    """Return the rank of this CTA in its cluster."""
    return cute.arch.make_warp_uniform(cute.arch.block_in_cluster_idx()[0])


def meet() -> None:
    """Wait for all threads of the cluster."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def address_in(cta, address):
    """Return the address in CTA ``cta`` of the cluster that corresponds to a shared-memory address of this CTA."""
    return ptx("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", address, Int32(cta), results=[Int32])


def arrive_at(barrier, cta) -> None:
    """Arrive at the barrier of CTA ``cta`` that has the address of ``barrier``, as CUTLASS's ``ClusterBarrier`` does.

    The arrival orders accesses within this CTA only. It suffices for consumers, whose reads have completed.
    """
    ptx("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", address_in(cta, shared_address(barrier)))


def store_async(address, words, barrier) -> None:
    """Store one, two or four words at a cluster address. They complete their bytes of a phase of ``barrier``, in the
    same CTA."""
    count = len(words)
    places = ", ".join(f"{{$r{2 + i}}}" for i in range(count))
    kind, value = (f".v{count}.b32", f"{{{places}}}") if count > 1 else (".b32", places)
    ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{kind} [{{$r0}}], {value}, [{{$r1}}];",
        address,
        barrier,
        *words,
    )


def copy_async(destination, source, size: int, barrier) -> None:
    """Copy ``size`` bytes of this CTA's shared memory to a cluster address.

    They complete a phase of ``barrier``, in the same CTA. The copy reads through the async proxy.
    """
    ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        destination,
        source,
        Int32(size),
        barrier,
    )


@device_struct
class ClusterRing(Ring):
    """A ring whose stages two CTAs fill together, each a part of both. Consumers release a stage in both CTAs."""

    @staticmethod
    def of(ring: Ring) -> "ClusterRing":
        return ClusterRing(**vars(ring))

    @cute.jit
    def release(self, step) -> None:
        if cute.arch.lane_idx() < CTAS:
            arrive_at(self.empty + self.stage(step), cute.arch.lane_idx())
