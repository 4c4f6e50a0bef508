"""Blackwell's tcgen05 kernels for ``python -m hopwell.emulator campaign --arch sm_100a``, with their equivalent faults.

An equivalent fault cannot change the kernel's behaviour.
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any
from unittest import mock

import torch

# The command runs this file without pytest, which would put the folder of ``helpers`` on the path.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers.batches.fp8 import Fp8Batch, Fp8MlaBatch
from helpers.batches.low_precision import E4M3, NVFP4, LowPrecisionBatch
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import CAUSAL, Batch
from helpers.device import equivalent_faults
from helpers.device.equivalent_faults import next_warp_barrier, places, reason_of_tensor_fence

from hopwell.emulator.ptx import Kernel, Reg
from hopwell.emulator.tools.faults import Fault, waits
from hopwell.kernels import execute
from hopwell.kernels.config import splitting
from hopwell.kernels.jit import settings
from hopwell.kernels.launch import geometry
from hopwell.kernels.parts.core.pipeline import NamedBarrier
from hopwell.kernels.problem import BlockScales

LENGTHS = [260, 3, 130, 2], [300, 10, 150, 0]


def case() -> None:
    """Run two query tiles and zero to three key tiles on one CTA, which reuses every stage.

    Each launch is short, because a campaign has many launches. Logits are so large that references move between steps.
    """
    data = Batch(*LENGTHS, heads=1, kv_heads=1, magnitude=3.0, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 1):
        execute(data.problem(16, lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 1)))


def prefill_pair() -> None:
    """Run the same on one pair of CTAs: the second query tile of a request is in the other CTA. Other work tiles follow
    two without keys. The last work tile has no keys either: the relay ends when all stages have been released."""
    lengths = [260, 3, 4, 130, 2, 5], [300, 0, 0, 150, 10, 0]
    data = Batch(*lengths, heads=1, kv_heads=1, head_dim=256, v_head_dim=256, magnitude=3.0, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 2):
        execute(data.problem(16, lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 1)))


def prefill_e4m3() -> None:
    data = Fp8Batch(*LENGTHS, heads=1, kv_heads=1, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 1):
        problem = data.in_fp8(16, CAUSAL, torch.bfloat16, lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 1))
        execute(problem)


def prefill_e4m3_cache(cache: torch.dtype = E4M3) -> None:
    """Run prefill of 16-bit queries over an e4m3 cache, which a warpgroup dequantizes in place."""
    types: dict[str, Any] = dict(q_dtype=torch.bfloat16, kv_dtype=cache, dtype=torch.bfloat16)
    data = LowPrecisionBatch(*LENGTHS, heads=1, kv_heads=1, magnitude=3.0, device="cpu", **types)
    options: dict[str, Any] = dict(lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 1))
    if cache is NVFP4:
        options["kv_scales"] = BlockScales(*data.block_scales(16, "interleaved"), interleaves_v=True)
    with mock.patch.object(geometry, "EMULATED_SMS", 1):
        execute(data.problem(16, out=torch.full_like(data.q, torch.nan), **options))


def prefill_nvfp4_cache() -> None:
    prefill_e4m3_cache(NVFP4)


def mla(kind: type[MlaBatch] = MlaBatch) -> None:
    """Run MLA with requests of zero to nine steps on three pairs of CTAs. The second pair has partials of two requests,
    so that other work follows each of its work tiles.

    Logits are so large that references move between steps.
    """
    kv_lens = [1150, 0, 900]
    data = kind([1] * len(kv_lens), kv_lens, heads=70, head_dim=320, v_head_dim=256, magnitude=3.0, device="cpu")
    with mock.patch.object(geometry, "EMULATED_SMS", 6):
        execute(data.decode(16, sinks=torch.linspace(-1, 1, 70)))


def mla_e4m3() -> None:
    mla(Fp8MlaBatch)


def mla_invariant(kind: type[MlaBatch] = MlaBatch) -> None:
    """Run batch-invariant MLA on two pairs. Requests have one or two chunks, and partials wait for used slots."""
    kv_lens = [1030, 0, 1040, 5, 1100, 1025]
    data = kind([1] * len(kv_lens), kv_lens, heads=70, head_dim=320, v_head_dim=256, magnitude=3.0, device="cpu")
    few_slots = mock.patch.multiple(splitting, COMFORTABLE_BYTES=0, LATENT_IN_FLIGHT=1)
    alone = mock.patch.object(settings.BATCH_INVARIANT, "given", True)
    with mock.patch.object(geometry, "EMULATED_SMS", 4), few_slots, alone:
        execute(data.decode(16, sinks=torch.linspace(-1, 1, 70)))


def equivalent(fault: Fault, kernel: Kernel) -> str:
    """Return why an undetected fault changes nothing, or ""."""
    of_kernel = _reason_of_mla if "MlaSm100" in kernel.name else _reason_of_prefill
    rules = [equivalent_faults.equivalent, reason_of_tensor_fence, _reason_of_dequantization, of_kernel]
    if of_kernel is _reason_of_prefill and places(kernel, "barrier.cluster"):
        rules.append(_reason_of_pairs)
    return next((reason for rule in rules if (reason := rule(fault, kernel))), "")


def _reason_of_dequantization(fault: Fault, kernel: Kernel) -> str:
    meets = [i.pc for i in kernel.instrs if i.text.startswith(f"bar.sync {int(NamedBarrier.DEQUANT)},")]
    if fault.kind == "wrong barrier number" and fault.sites[0] in meets:
        return "the warps that dequantize meet at the next barrier, which no other warp uses"
    if fault.kind == "drop fence.proxy.async" and meets and fault.sites[0] < meets[0]:
        return "the warps that dequantize read the rows of zeros through the generic proxy"
    # With as many threads as keys, a thread of NVFP4 reads a row and writes this row. It looks values up by prmt.
    pc = fault.sites[0]
    if fault.kind == "drop bar.sync" and pc in meets and any(i.op == "prmt.b32" for i in kernel.instrs[pc : pc + 60]):
        return "a thread overwrites only the row that it has read itself"
    if fault.kind == "drop bar.warp.sync" and meets and meets[0] - 99 < pc < meets[-1]:
        return "each lane waits for the tile itself, and reads and writes its own row"
    return ""


def _reason_of_prefill(fault: Fault, kernel: Kernel) -> str:
    pc = fault.sites[0]
    if fault.kind == "drop bar.warp.sync":
        rows = places(kernel, "st.global", ".v4")
        results = [store for store in places(kernel, "st.global") if store < rows[0]]
        if kernel.instrs[pc - 1].op.startswith("tcgen05.fence::before"):
            return "the warp has met in its last access to tensor memory, or in a vote"
        if pc == next_warp_barrier(kernel, results[-1]):
            return "every lane hands on its own factor; the warp meets again when it reads its next tile"
        if pc in {next_warp_barrier(kernel, row) for row in rows}:
            return (
                "lanes that have stored a part of their rows meet again before the next part, or before O is given back"
            )
    if fault.kind == "drop tcgen05.fence" and _precedes_scores(kernel, pc):
        return "the fences before O have ordered the first S of a tile behind the reads of the tile before"
    if fault.kind == "drop tcgen05.wait" and "wait::ld" in fault.text:
        return "ptxas itself waits for registers of a load; that they are only moved is no fault in strict mode"
    if fault.kind == "drop mbarrier wait":
        every, last_copy = [group[0].pc for group in waits(kernel)], places(kernel, "cp.async.bulk.tensor")[-1]
        is_pair = bool(places(kernel, "barrier.cluster"))  # whose last commit may be for Q
        if not is_pair and pc == next(wait for wait in every if wait > places(kernel, "tcgen05.commit")[-1]):
            return "what the waits behind it are for was committed later"
        if pc == max(wait for wait in every if wait < last_copy):
            return "both stages of Q are given back behind the same products, and the first has been waited for"
    return ""


def _reason_of_pairs(fault: Fault, kernel: Kernel) -> str:
    """Return why a dropped signal between the CTAs of a pair changes nothing in prefill, or ""."""
    pc, products = fault.sites[0], places(kernel, "tcgen05.mma")
    signals = ("mbarrier", "tcgen05", "bar", "fence", "ld.shared", "st.shared")
    last = next((i.op for i in reversed(kernel.instrs[:pc]) if i.op.startswith(signals)), "")
    if fault.kind == "drop bar.sync" and _next(kernel, pc, signals).startswith("barrier.cluster"):
        return "both CTAs meet at once"
    if fault.kind == "drop bar.warp.sync" and last.startswith("mbarrier.try_wait"):
        return "every lane of the relay has waited itself"
    if fault.kind == "drop fence.release":
        # The fence is behind a warp barrier. The relay has waited for a tile, and others for tensor memory.
        if pc < products[0]:
            return "only tensor memory changes hands, and tcgen05.fence orders it"
        if _next(kernel, pc, ("fence.release", "tcgen05")).startswith("fence.release") and _tells_of_q(kernel, pc):
            return "the relay tells of Q before it tells of K, with a fence that covers both"
    if fault.kind == "drop fence.acquire" and pc < products[-1]:
        if _next(kernel, pc, ("fence.acquire", "tcgen05.mma")).startswith("fence.acquire"):
            return "another wait follows before the next product, and its fence covers both"
        if not _precedes_scores(kernel, pc):
            return "P V has had a fence behind the wait for V, and only tensor memory changes hands behind the others"
    if fault.kind == "drop mbarrier wait":
        is_relayed = "cluster" in fault.text and _tells_of_q(kernel, pc)
        keyless = _next(kernel, pc, ("tcgen05",)).startswith("tcgen05.commit")
        if is_relayed and not keyless and _precedes_scores(kernel, pc):
            return "the relay tells of Q before it tells of K, which the leader waits for too"
    return ""


def _tells_of_q(kernel: Kernel, pc: int) -> bool:
    """Whether the barrier of a signal is one of Q. Its ring has one stage, so its address is fixed. An addition right
    before computes the ones of K and V."""
    near = kernel.instrs[max(pc - 12, 0) : pc + 1]
    found = [re.search(r"(?:mapa\S* %?\w+, |try_wait\S* %?\w+, \[)(%r\d+)", i.text) for i in near]
    address = next((match[1] for match in reversed(found) if match), "")
    return bool(address) and not any(i.text.startswith(f"add.s32 {address},") for i in near)


def _next(kernel: Kernel, pc: int, starts: tuple[str, ...]) -> str:
    """Return the next instruction behind ``pc`` that starts like this, or ""."""
    return next((i.op for i in kernel.instrs[pc + 1 :] if i.op.startswith(starts)), "")


def _precedes_scores(kernel: Kernel, pc: int) -> bool:
    """Whether the next product behind a fence has both operands in shared memory: S, before which P V has a fence."""
    product = next((i for i in kernel.instrs[pc:] if i.op.startswith("tcgen05.mma")), None)
    return product is not None and isinstance(product.args[1], Reg)


def _reason_of_mla(fault: Fault, kernel: Kernel) -> str:
    pc, products = fault.sites[0], places(kernel, "tcgen05.mma")
    synchronises = ("mbarrier", "tcgen05", "bar", "ld.shared", "st.shared")
    follows = next((i.op for i in kernel.instrs[fault.sites[-1] + 1 :] if i.op.startswith(synchronises)), "")
    if fault.kind == "drop bar.sync" and follows.startswith("barrier.cluster"):
        return "both CTAs meet at once"
    if fault.kind == "drop bar.warp.sync":
        before = (i.op for i in reversed(kernel.instrs[:pc]))
        last = next(op for op in before if op.startswith(("tcgen05", "mbarrier", "fence", "st.shared")))
        if last.startswith("tcgen05.fence::before"):
            return "the warp has met in its last access to tensor memory"
        if last.startswith("mbarrier.try_wait"):
            return "every lane of the relay has waited itself"
        if last.startswith("mbarrier.arrive"):
            return "the warp has just met, before it signalled its partial"
        signals = _next(kernel, pc, ("mbarrier", "ld.", "st.", "atom")).startswith("mbarrier.arrive")
        if last.startswith("fence.acq_rel") and signals:
            return "the lane that has polled signals itself"
    if fault.kind == "drop fence.release":
        before = (i.op for i in reversed(kernel.instrs[:pc]))
        if next(op for op in before if op.startswith(("tcgen05", "mbarrier.try", "fence"))).startswith("tcgen05.fence"):
            return "only tensor memory changes hands, and tcgen05.fence orders it"
        if _next(kernel, pc, ("fence.release", "tcgen05.commit")).startswith("fence.release") and pc > products[-1]:
            return "the relay tells of Q before it tells of K, with a fence that covers both"
    covers = _next(kernel, pc, ("fence.acquire", "tcgen05.mma")).startswith("fence.acquire")
    if fault.kind == "drop fence.acquire" and covers:
        return "another wait follows before the next product, and its fence covers both"
    if fault.kind == "drop global store":
        if fault.text.endswith("], 0"):
            return "the counter is 0 already, or its slot is not counted again on this problem"
        if _next(kernel, pc, ("atom", "st.release", "bar", "mbarrier", "tcgen05")).startswith("atom"):
            return "the first row of a share is 0 here, and an earlier share in its slot had the same counts"
    if fault.kind == "drop tcgen05.fence" and max(places(kernel, "tcgen05.ld")) < pc < products[-1]:
        return "the mma warp has one fence behind the waits of a step and another before each of its products"
    if fault.kind == "drop mbarrier wait":
        if pc < products[0] and follows.startswith("mbarrier.try_wait"):
            return "the relay tells of Q before it tells of K, which the leader waits for too"
        if is_repeated_before_effects(kernel, fault.sites[-1]):
            return "the place of the next work tile is computed earlier, but a work tile is posted when there is room"
    return ""


def is_repeated_before_effects(kernel: Kernel, pc: int) -> bool:
    """Whether a wait ends a loop that waits for the same barrier again before it writes memory or signals."""
    back = next((i for i in kernel.instrs[pc + 1 :] if i.parts[0] == "bra" and -1 < i.target < pc), None)
    if back is None:
        return False
    following = [*kernel.instrs[pc + 1 : back.pc], *kernel.instrs[back.target : pc]]
    effects = ("st", "atom", "red", "cp", "tcgen05", "fence", "bar", "barrier", "mbarrier", "ld.shared")
    again = next((i for i in following if i.op.startswith(effects)), None)
    return again is not None and again.op.startswith("mbarrier.try_wait") and again.args[1] == kernel.instrs[pc].args[1]
