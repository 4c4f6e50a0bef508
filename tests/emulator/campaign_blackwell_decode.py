"""Blackwell's tcgen05 kernels of few rows for ``python -m hopwell.emulator campaign --arch sm_100a``: decode, and MLA.

An equivalent fault cannot change a kernel's behaviour.
"""

from __future__ import annotations

import pathlib
import sys
from unittest import mock

import torch

# The command runs this file without pytest, which would put the folder of ``helpers`` on the path.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers.batches.decode import NVFP4, DecodeBatch
from helpers.batches.fp8 import E4M3, Fp8MlaBatch
from helpers.batches.mla import MlaBatch
from helpers.device import equivalent_faults
from helpers.device.equivalent_faults import places

from hopwell.emulator.ptx import Kernel
from hopwell.emulator.tools.faults import Fault
from hopwell.kernels import execute
from hopwell.kernels.launch import geometry


def decode(
    kv_dtype: torch.dtype | None = None,
    leaf: int = 128,
    sms: int = 2,
    rows: int = 8,
    leaves: int = 6,
    head_dim: int = 128,
) -> None:
    """Run decode with requests of zero to ``leaves`` + 1 leaves; all CTAs share the longest request.

    Logits are so large that references move between leaves.
    """
    kv_lens = [leaves * leaf + 32, 0, leaf + 12, 70]
    data = DecodeBatch(
        [1] * 4, kv_lens, heads=rows, kv_heads=1, head_dim=head_dim, kv_dtype=kv_dtype, magnitude=3.0, device="cpu"
    )
    with mock.patch.object(geometry, "EMULATED_SMS", sms):
        execute(data.decode(16, sinks=torch.linspace(-1, 1, rows)))


def decode_e4m3() -> None:
    decode(E4M3, leaf=256, sms=1)


def decode_e4m3_256() -> None:
    """Run decode of 256 columns, with one buffer of operand A: a pair of tiles waits for the products of another."""
    decode(E4M3, leaf=256, sms=1, head_dim=256)


def decode_nvfp4() -> None:
    decode(NVFP4, leaf=256, sms=1)


def decode_rows(kv_dtype: torch.dtype | None = None, rows: int = 40) -> None:
    """Run decode of 40 rows, on two warpgroups of two CTAs. The longest request has 13 leaves."""
    decode(kv_dtype, leaf=256, rows=rows, leaves=12)


def decode_rows_e4m3() -> None:
    decode_rows(E4M3)


def decode_32_rows_e4m3() -> None:
    decode_rows(E4M3, rows=32)


def decode_rows_nvfp4() -> None:
    decode_rows(NVFP4)


def swap_ab_mla(kind: type[MlaBatch] = MlaBatch, kv_dtype: torch.dtype | None = None) -> None:
    """Run MLA with requests of zero to two leaves. Two CTAs share the longest request, and reuse stages of Q."""
    kv_lens = [70, 140, 520, 9, 3, 0]
    options = dict(kv_dtype=kv_dtype) if kv_dtype is not None else {}
    data = kind([1] * 6, kv_lens, heads=16, head_dim=320, v_head_dim=256, magnitude=3.0, device="cpu", **options)
    with mock.patch.object(geometry, "EMULATED_SMS", 2):
        execute(data.decode(16, sinks=torch.linspace(-1, 1, 16)))


def swap_ab_mla_e4m3() -> None:
    swap_ab_mla(Fp8MlaBatch)


def swap_ab_mla_8_bit() -> None:
    swap_ab_mla(kv_dtype=E4M3)


def equivalent(fault: Fault, kernel: Kernel) -> str:
    """Return why an undetected fault changes nothing, or ""."""
    of_tensor_memory = (
        equivalent_faults.reason_of_tensor_fence,
        _reason_of_fence,
        equivalent_faults.reason_of_tensor_wait,
    )
    rules = equivalent_faults.equivalent, *of_tensor_memory, _reason_of_meeting, _reason_of_commit
    return next((reason for rule in rules if (reason := rule(fault, kernel))), "")


def _dequantizes(kernel: Kernel) -> bool:
    """Whether operand A of products is in tensor memory."""
    return bool(places(kernel, "tcgen05.st"))


def _reason_of_fence(fault: Fault, kernel: Kernel) -> str:
    pc, op = fault.sites[0], kernel.instrs[fault.sites[0]].op
    if fault.kind == "drop tcgen05.fence":
        products = [i for i in kernel.instrs if i.op.startswith("tcgen05.mma")]
        loads = places(kernel, "tcgen05.wait::ld")
        following = next((i for i in products if i.pc > pc), None)
        if "after" in op and _next_access(kernel, pc).startswith("tcgen05.st"):
            return "a leaf has a buffer of operand A for each pair, and the wait for S or O has a fence of its own"
        is_behind_wait = not kernel.instrs[pc - 1].op.startswith("bar.sync")
        if "after" in op and is_behind_wait and following is not None and following.args[3] == products[0].args[3]:
            return "S comes behind O in the order of products, and the fence before O orders it, too"
        if "before" in op and pc - 1 in (loads if _dequantizes(kernel) else loads[1:]):
            return "the warp has another fence before products overwrite this: behind S, or behind operand A"
    if fault.kind == "drop fence.proxy.async" and _dequantizes(kernel):
        if kernel.instrs[pc - 1].op.startswith("cp.async.wait"):
            return "lanes read Q themselves, and rewrite it with a fence of their own"
        if kernel.instrs[pc + 1].op.startswith("bar.warp.sync"):
            return "lanes read V and its scales, and have a fence between their wait and the release"
    return ""


def _next_access(kernel: Kernel, pc: int) -> str:
    """Return the next instruction that accesses tensor memory."""
    accesses = ("tcgen05.ld", "tcgen05.st", "tcgen05.mma", "tcgen05.dealloc")
    return next((i.op for i in kernel.instrs[pc + 1 :] if i.op.startswith(accesses)), "")


def _reason_of_commit(fault: Fault, kernel: Kernel) -> str:
    if fault.kind == "commit before its last product" and _dequantizes(kernel):
        following = (i.op for i in kernel.instrs[max(fault.sites) + 1 :] if i.op.startswith("tcgen05."))
        if next(following, "").startswith("tcgen05.commit"):
            return "a leaf has a buffer of operand A for each pair, and S or O is signalled behind all its products"
    return ""


def _reason_of_meeting(fault: Fault, kernel: Kernel) -> str:
    pc, before = fault.sites[0], kernel.instrs[fault.sites[0] - 1].op
    if equivalent_faults.uses_a_free_barrier(fault, kernel):
        return "all that meet do so here, and nobody uses the other barrier"
    if equivalent_faults.follows_a_node(fault, kernel):
        return "a node is read in another leaf, or when it has been counted or handed over: the warps meet in between"
    if fault.kind == "drop bar.warp.sync" and before.startswith("tcgen05.fence::before"):
        return "the warp has met in its last access to tensor memory"
    if fault.kind == "drop bar.sync":
        synchronises = ("bar.sync", "mbarrier", "tcgen05", "st.")
        following = [i.op for i in kernel.instrs[pc + 1 :] if i.op.startswith(synchronises)]
        if _dequantizes(kernel) and before.startswith("fence.proxy.async"):
            return "each warp signals its words of operand A behind its words of Q and P"
        if next(op for op in following if not op.startswith("mbarrier.try_wait")).startswith("bar.sync"):
            return "the warps meet again before one of them writes"
        is_attend = pc > places(kernel, "tcgen05.alloc")[0]
        if "SwapABMlaSm90" in kernel.name and is_attend and following[0].startswith("mbarrier.try_wait"):
            return "attend has met behind its last exchange of maxima"
        if "SwapABDecodeSm90" in kernel.name and "tcgen05.dealloc" in " ".join(following[:2]):
            return "the warps have met at the end of their last segment, behind their last access to tensor memory"
    return ""
