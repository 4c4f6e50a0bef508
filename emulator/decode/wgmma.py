"""Decoders of wgmma; native/wgmma.c executes them."""

from __future__ import annotations

from ..errors import Unsupported
from ..ptx import Imm, Instr, Vec
from .mma import FORMAT
from .op import Context, Op, decodes, items

NEGATE, A_MN, B_MN, A_REGS = 1, 2, 4, 8
SIXTEEN_BIT = ("f16", "bf16")


@decodes("wgmma.mma_async")
def mma_async(c: Context, i: Instr) -> Op:
    p = i.parts
    if "sp" in p:
        raise Unsupported(i.op)
    shape = next(x for x in p if x.startswith("m64n"))
    n, k = (int(x) for x in shape[4:].split("k"))
    d_type, a_type, b_type = p[-3:]
    in_registers = isinstance(i.args[1], Vec)
    rest = list(i.args[3:])
    scale = rest.pop(0)
    # scale-d, imm-scale-a, imm-scale-b, then the transposition bits of operands in shared memory (16-bit types only)
    numbers = [a.bits for a in rest]
    flags = A_REGS if in_registers else 0
    if len(numbers) >= 2 and numbers[0] * numbers[1] < 0:
        flags |= NEGATE
    if a_type in SIXTEEN_BIT and len(numbers) > 2:
        flags |= B_MN if numbers[-1] else 0
        flags |= A_MN if not in_registers and numbers[2] else 0
    d_rows = [c.file.register(r) for r in items(i.args[0])]
    a_rows = [c.file.register(r) for r in items(i.args[1])] if in_registers else []
    head = [n, k, FORMAT[d_type], FORMAT[a_type], FORMAT[b_type], flags, len(d_rows), len(a_rows)]
    if isinstance(scale, Imm):
        predicate, imm = 0xFFFFFFFF, int(scale.bits != 0)
    else:
        number, negated = c.pred(scale)
        predicate, imm = number, 2 if negated else 0
    a = 0xFFFFFFFF if in_registers else c.src(i.args[1], "b64")
    # The instruction itself accounts for the accumulators and a register operand; they are not recorded as ordinary
    # uses.
    return c.system("wgmma", a=a, b=c.src(i.args[2], "b64"), c=predicate, imm=imm, words=[*head, *d_rows, *a_rows])


@decodes("wgmma.fence")
def fence(c: Context, i: Instr) -> Op:
    return c.system("wgmma_fence")


@decodes("wgmma.commit_group")
def commit(c: Context, i: Instr) -> Op:
    return c.system("wgmma_commit")


@decodes("wgmma.wait_group")
def wait(c: Context, i: Instr) -> Op:
    return c.system("wgmma_wait", imm=i.args[0].bits)
