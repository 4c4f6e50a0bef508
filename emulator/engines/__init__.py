"""Asynchronous engines and tensor cores: all instructions that Python executes, one module for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import EmulatorError

if TYPE_CHECKING:
    from ..machine.machine import Machine
    from ..machine.state import Cluster, Warp

from . import (
    bulk,
    cp_async,  # noqa: F401
    launch_control,  # noqa: F401
    store_async,  # noqa: F401
    tensor_allocation,
    tensor_copy,  # noqa: F401
    tensor_core,  # noqa: F401
    tensor_memory,
    tma,  # noqa: F401
)


def at_warp_exit(m: Machine, w: Warp) -> None:
    """Check the state after the last lane of a warp has exited, and after the last warp of its CTA has."""
    if m.core.core_wgmma_outstanding(w.address) > 0:
        raise EmulatorError(f"{w} exits with wgmma operations outstanding")
    tensor_memory.at_warp_exit(m, w)
    if w.cta.exited:
        bulk.at_cta_exit(m, w.cta)


def at_cluster_end(m: Machine, cluster: Cluster) -> None:
    bulk.at_cluster_end(m, cluster)
    tensor_allocation.at_cluster_end(m, cluster)
