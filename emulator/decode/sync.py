"""Decoders of barriers, fences and warp-wide instructions."""

from __future__ import annotations

import math

from ..errors import Unsupported
from ..native.layout import AUX_ACQUIRE, AUX_RELEASE, NONE
from ..ptx import SINK, Instr, Mem, Pair, type_size
from .op import Context, Op, decodes

REGISTERS = 65536  # per SM
MOST_REGISTERS = 255  # of a thread


# ------------------------------------------------------------------ warp-wide
@decodes("shfl")
def shfl(c: Context, i: Instr) -> Op:
    mode = ("up", "down", "bfly", "idx").index(i.parts[2])
    a, b, limits = (c.src(x, "b32") for x in i.args[1:4])
    member = c.src(i.args[4], "b32") if len(i.args) > 4 else NONE
    d, p = (i.args[0].a, i.args[0].b) if isinstance(i.args[0], Pair) else (i.args[0], None)
    return c.system("shfl", c.dst(d, "b32"), a, b, limits, e=member, d2=c.pred_dst(p), imm=mode)


@decodes("vote")
def vote(c: Context, i: Instr) -> Op:
    mode = ("any", "all", "uni", "ballot").index(i.parts[2])
    p, negated = c.pred(i.args[1])
    member = c.src(i.args[2], "b32") if len(i.args) > 2 else NONE
    d = c.dst(i.args[0], "b32") if mode == 3 else c.pred_dst(i.args[0])
    return c.system("vote", d, p, member, imm=mode | (4 if negated else 0))


@decodes("elect")
def elect(c: Context, i: Instr) -> Op:
    member = c.src(i.args[1], "b32")
    d, p = (i.args[0].a, i.args[0].b) if isinstance(i.args[0], Pair) else (SINK, i.args[0])
    return c.system("elect", c.dst_or_none(d), member, d2=c.pred_dst(p))


@decodes("activemask")
def activemask(c: Context, i: Instr) -> Op:
    return c.system("activemask", c.dst(i.args[0], "b32"))


@decodes("match")
def match(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    d, p = (i.args[0].a, i.args[0].b) if isinstance(i.args[0], Pair) else (i.args[0], None)
    a, member = c.src(i.args[1], t), c.src(i.args[2], "b32")
    return c.system(
        "match", c.dst(d, "b32"), a, member, d2=c.pred_dst(p), imm=int(i.parts[1] == "all"), size=type_size(t)
    )


@decodes("redux")
def redux(c: Context, i: Instr) -> Op:
    operation = ("add", "min", "max", "and", "or", "xor").index(i.parts[2])
    t = i.parts[-1]
    aux = {"s32": 1, "f32": 2}.get(t, 0) | (4 if "abs" in i.parts else 0) | (8 if "NaN" in i.parts else 0)
    a, member = c.src(i.args[1], t), c.src(i.args[2], "b32")
    return c.system("redux", c.dst(i.args[0], t), a, member, imm=operation, aux=aux)


@decodes("movmatrix")
def movmatrix(c: Context, i: Instr) -> Op:
    return c.system("movmatrix", c.dst(i.args[0], "b32"), c.src(i.args[1], "b32"))


@decodes("trap", "brkpt")
def trap(c: Context, i: Instr) -> Op:
    return c.system("trap")


# ------------------------------------------------------------------ CTA and cluster barriers
@decodes("bar.warp")
def warp_barrier(c: Context, i: Instr) -> Op:
    return c.system("warpsync", a=c.src(i.args[0], "b32"))


@decodes("bar", "barrier")
def barrier(c: Context, i: Instr) -> Op:
    p = i.parts
    kind = next(x for x in p if x in ("sync", "arrive", "red"))
    args = list(i.args)
    d, predicate, negated, aux = NONE, NONE, 0, ("sync", "arrive", "red").index(kind)
    if kind == "red":
        how = next(x for x in p if x in ("popc", "and", "or"))
        aux = 2 + ("popc", "and", "or").index(how)
        predicate, negated = c.pred(args.pop())
        first = args.pop(0)
        d = c.dst(first, "u32") if how == "popc" else c.pred_dst(first)
    number = c.src(args[0], "u32")
    count = c.src(args[1], "u32") if len(args) > 1 else NONE
    aligned = p[0] == "bar" or "aligned" in p
    return c.system("bar", d, number, count, predicate, imm=int(negated) + 2 * aligned, aux=aux)


@decodes("barrier.cluster")
def cluster_barrier(c: Context, i: Instr) -> Op:
    if "arrive" in i.parts:
        return c.system("cluster_arrive", aux=int("relaxed" in i.parts))
    return c.system("cluster_wait")


# ------------------------------------------------------------------ mbarriers
@decodes("mbarrier.init")
def mbarrier_init(c: Context, i: Instr) -> Op:
    row, off, wide = c.address(i.args[0])
    if wide:
        raise Unsupported(i.text)
    return c.system("mbar_init", a=row, b=c.src(i.args[1], "u32"), imm=off)


@decodes("mbarrier.inval")
def mbarrier_inval(c: Context, i: Instr) -> Op:
    row, off, _ = c.address(i.args[0])
    return c.system("mbar_inval", a=row, imm=off)


@decodes("mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_arrive(c: Context, i: Instr) -> Op:
    p = i.parts
    aux = 3 if p[1] == "complete_tx" else 2 if p[1] == "expect_tx" else 1 if "expect_tx" in p else 0
    aux |= 4 if p[1] == "arrive_drop" else 0
    args = list(i.args)
    state = NONE if isinstance(args[0], Mem) else c.dst_or_none(args.pop(0))
    row, off, wide = c.address(args[0])
    aux |= (8 if wide else 0) | (16 if "relaxed" in p else 0)
    count = c.src(args[1], "u32") if len(args) > 1 else NONE
    return c.system("mbar_arrive", state, row, count, imm=off, aux=aux)


@decodes("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(c: Context, i: Instr) -> Op:
    parity = "parity" in i.parts
    row, off, wide = c.address(i.args[1])
    phase = c.src(i.args[2], "b32" if parity else "b64")
    aux = int(i.parts[1] == "test_wait") | (2 if parity else 0) | (8 if wide else 0)
    aux |= (4 if getattr(i, "flipped", False) else 0) | (16 if "relaxed" in i.parts else 0)
    d = i.args[0].a if isinstance(i.args[0], Pair) else i.args[0]
    return c.system("mbar_wait", c.pred_dst(d), row, phase, imm=off, aux=aux)


# ------------------------------------------------------------------ fences and hints
@decodes("fence.proxy.async")
def proxy_fence(c: Context, i: Instr) -> Op:
    return c.system("fence_proxy")


@decodes("fence", "membar")
def fence(c: Context, i: Instr) -> Op:
    """Decode a fence. The emulator's memory is sequentially consistent, so only the race detector acts on a fence.

    Up to cluster scope, it gives order to relaxed arrivals and waits at mbarriers.
    """
    if i.parts[1].startswith(("proxy", "mbarrier_init")):
        return c.nop()
    aux = (0 if "release" in i.parts else AUX_ACQUIRE) | (0 if "acquire" in i.parts else AUX_RELEASE)
    if any(p in ("gpu", "sys", "gl") for p in i.parts):
        return c.system("fence_gpu", aux=aux)
    return c.system("fence", aux=aux)


@decodes("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def tensor_fence(c: Context, i: Instr) -> Op:
    return c.system("tensor_fence", aux=int("fence::after_thread_sync" in i.parts))


@decodes("griddepcontrol", "nanosleep", "pragma")
def no_effect(c: Context, i: Instr) -> Op:
    """Decode an instruction without effect here: register budgets, time and dependent launch.

    Launches run one after another, so a dependent launch never waits.
    """
    return c.nop()


@decodes("setmaxnreg")
def setmaxnreg(c: Context, i: Instr) -> Op:
    """Decode setmaxnreg.

    By the PTX ISA, setmaxnreg takes 24 to 256 registers in steps of 8, and whole warps execute it. A change in the
    wrong direction is an illegal instruction on an H200. ptxas starts a kernel with the most registers that the SM's
    thread count allows.
    """
    n = i.args[0].bits
    if n % 8 or not 24 <= n <= 256:
        raise Unsupported(f"{i.text}: the register count must be a multiple of 8 from 24 to 256")
    kernel = c.file.kernel
    threads = math.prod(kernel.threads)
    launched = REGISTERS // (threads * kernel.ctas_per_sm) // 8 * 8 if threads else n
    # A thread has 255 registers at most; below that limit ptxas decides.
    if launched <= MOST_REGISTERS and (("dec" in i.parts and n > launched) or ("inc" in i.parts and n < launched)):
        raise Unsupported(f"{i.text}: the {threads} threads of the kernel start with {launched} registers each")
    return c.system("converge")
