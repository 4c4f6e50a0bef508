"""Kernels of sm_120 for ``python -m hopwell.emulator campaign --arch sm_120a``, with their equivalent faults.

An equivalent fault cannot change a kernel's behaviour.
"""

from __future__ import annotations

import pathlib
import re
import sys
from unittest import mock

import torch

# The command runs this file without pytest, which would put the folder of ``helpers`` on the path.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers.batches.decode import DecodeBatch
from helpers.batches.prefill import Batch
from helpers.device import equivalent_faults
from helpers.device.equivalent_faults import next_warp_barrier

from hopwell.emulator.ptx import Kernel
from hopwell.emulator.tools.faults import Fault
from hopwell.kernels import execute
from hopwell.kernels.launch import geometry


def case() -> None:
    """Run prefill with two query tiles and zero to three key tiles on one CTA, which reuses every stage."""
    data = Batch([140, 3, 70, 2], [170, 300, 100, 0], heads=1, kv_heads=1, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 1):
        execute(data.problem(16, lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 1)))


def decode() -> None:
    """Run decode with requests of zero to seven leaves; two CTAs share the longest request."""
    data = DecodeBatch([1, 1, 2, 1], [800, 0, 140, 70], heads=4, kv_heads=1, head_dim=128, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 2):
        execute(data.decode(16, sinks=torch.linspace(-1, 1, 4)))


def equivalent(fault: Fault, kernel: Kernel) -> str:
    """Return why an undetected fault changes nothing, or ""."""
    if fault.kind == "drop bar.sync" and re.match(r"bar\.sync %r\d+, 128", fault.text):
        return "only tells the compiler that a warpgroup has converged: its warps have nothing in common"
    return equivalent_faults.equivalent(fault, kernel) or _own_reason(fault, kernel)


def _own_reason(fault: Fault, kernel: Kernel) -> str:
    pc, before = fault.sites[0], kernel.instrs[: fault.sites[0]]
    if equivalent_faults.uses_a_free_barrier(fault, kernel):
        return "all that meet do so here, and nobody uses the other barrier"
    if fault.kind == "drop fence.proxy.async" and before[-1].op.startswith("cp.async.wait"):
        return "lanes read Q themselves, through the proxy through which lanes have copied it"
    if fault.kind == "drop bar.warp.sync":
        products = [i.pc for i in kernel.instrs if i.op.startswith("mma.")]
        if "PrefillSm120" in kernel.name and pc == next_warp_barrier(kernel, products[-1]):
            return "the words of Q that lanes have read went into products of the whole warp"
    if "SwapABDecodeSm90" in kernel.name and equivalent_faults.follows_a_node(fault, kernel):
        return "a node is read in another leaf, or when it has been counted: the warps meet in between"
    return ""
