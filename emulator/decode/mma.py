"""Decoder of mma.sync."""

from __future__ import annotations

import re

from ..errors import Unsupported
from ..native.layout import NONE
from ..ptx import Instr
from .op import Context, Op, decodes, items

FORMAT = {
    "f32": 0, "f16": 1, "bf16": 2, "tf32": 3, "e4m3": 4, "e5m2": 5, "e2m1": 6, "e2m3": 7, "e3m2": 8, "ue8m0": 9,
    "ue4m3": 10, "s8": 11, "u8": 12, "s32": 13,
}  # fmt: skip
BYTE_FLOATS = {"e4m3", "e5m2"}
# Targets without mma.sync of 8-bit floats in machine code; ptxas emits f16 products instead.
WITHOUT_BYTE_FLOATS = ("sm_90a", "sm_100a", "sm_103a")
WITH_KINDS = "sm_12"  # targets with .kind products of 4, 6 and 8 bits, block-scaled ones included


@decodes("mma")
def mma(c: Context, i: Instr) -> Op:
    shape = next(p for p in i.parts if re.fullmatch(r"m\d+n\d+k\d+", p))
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    if (m, n) != (16, 8) or "sp" in i.parts or "sp::ordered_metadata" in i.parts:
        raise Unsupported(i.op)
    target = c.file.kernel.target
    if any(p.startswith("kind::") for p in i.parts) and not target.startswith(WITH_KINDS):
        raise Unsupported(f"{i.op} on {target}: only targets from {WITH_KINDS}0 on have it")
    types = [p for p in i.parts[i.parts.index("col") + 1 :] if p in FORMAT]
    d_type, a_type, b_type, c_type = types[:4]
    if d_type != c_type:
        raise Unsupported(i.op)
    d, a, b, acc = (items(x) for x in i.args[:4])
    words = [c.dst(r, "b32") for r in d]
    for group in (a, b, acc):
        words += [c.src(r, "b32") for r in group]
    counts = len(a) | len(b) << 8 | len(d) << 16
    formats = FORMAT[a_type] | FORMAT[b_type] << 8 | FORMAT[d_type] << 16
    in_halves = d_type == "f32" and {a_type, b_type} <= BYTE_FLOATS and target in WITHOUT_BYTE_FLOATS
    op = c.system("mma", counts, formats, e=NONE, imm=k, words=words, aux=int(in_halves))
    if "block_scale" in i.parts:
        block_scale(c, i, op, types)
    return op


def block_scale(c: Context, i: Instr, op: Op, types: list[str]) -> None:
    """Add scale registers to ``op``, with the byte and thread that hold them (PTX ISA, "mma with block scaling")."""
    per = next((int(p[len("scale_vec::")]) for p in i.parts if p.startswith("scale_vec::")), 1)
    fmt = FORMAT[types[4]] if len(types) > 4 else FORMAT["ue8m0"]
    byte_a, thread_a, byte_b, thread_b = (c.src(x, "b16") for k in (5, 7) for x in items(i.args[k]))
    sa, sb = items(i.args[4])[0], items(i.args[6])[0]
    op.o[2], op.o[3] = c.src(sa, "b32"), c.src(sb, "b32")
    op.o[4] = per | fmt << 8
    op.words += [byte_a, thread_a, byte_b, thread_b]
