"""Decoders of loads, stores, atomics and matrix loads."""

from __future__ import annotations

from ..errors import Unsupported
from ..native.layout import (
    AUX_ACQUIRE,
    AUX_ADDR64,
    AUX_RELEASE,
    AUX_SIGNED,
    AUX_STRONG,
    NONE,
    SPACE_GENERIC,
    SPACE_GLOBAL,
    SPACE_LOCAL,
    SPACE_PARAM,
    SPACE_SHARED,
)
from ..ptx import SINK, Instr, Mem, Reg, Sym, type_size
from .op import Context, Op, decodes, items
from .registers import ELEMENT

SPACES = {"global": SPACE_GLOBAL, "shared": SPACE_SHARED, "local": SPACE_LOCAL, "param": SPACE_PARAM}


def space_of(parts: list[str]) -> int:
    """Return the state space named in an opcode; an opcode without one uses generic addressing."""
    for p in parts[1:]:
        space = SPACES.get(p.split("::")[0])
        if space is not None and not p.startswith(("L1", "L2")):
            return space
    return SPACE_GENERIC


def ordering(parts: list[str]) -> int:
    """Return the AUX_* bits of a memory access's ordering qualifier (PTX ISA, "memory consistency model")."""
    aux = 0
    if "acquire" in parts or "acq_rel" in parts:
        aux |= AUX_STRONG | AUX_ACQUIRE
    if "release" in parts or "acq_rel" in parts:
        aux |= AUX_STRONG | AUX_RELEASE
    if "relaxed" in parts or "volatile" in parts or "mmio" in parts:
        aux |= AUX_STRONG
    return aux


@decodes("ld", "ldu")
def load(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    mem: Mem = i.args[1]
    space = space_of(i.parts)
    dst = items(i.args[0])
    size = type_size(t)
    if space == SPACE_PARAM and not isinstance(mem.base, Reg):
        return parameter(c, i, t, mem, dst)
    row, off, wide = c.address(mem)
    words = []
    for d in dst:
        words += [c.dst_or_none(d), c.element(d, t)]
    aux = ordering(i.parts) | (AUX_ADDR64 if wide else 0) | (AUX_SIGNED if t[0] == "s" else 0)
    return c.system("ld", a=row, imm=off, words=words, space=space, size=size, vec=len(dst), aux=aux)


def parameter(c: Context, i: Instr, t: str, mem: Mem, dst: tuple) -> Op:
    """Decode ld.param with a constant address: a move from a row that the launch fills."""
    assert isinstance(mem.base, Sym)
    base = next(p.offset for p in c.file.kernel.params if p.name == mem.base.name) + mem.off
    if len(dst) == 1:
        d = dst[0]
        row = c.file.parameter(d.kind, base, t)
        return c.lane(f"mov_b{8 * ELEMENT[d.kind]}", c.dst(d, t), row)
    words = []
    for d in dst:
        words += [c.dst_or_none(d), c.element(d, t)]
    row = c.file.constant("d", base)
    signed = AUX_SIGNED if t[0] == "s" else 0
    return c.system(
        "ld", a=row, words=words, space=SPACE_PARAM, size=type_size(t), vec=len(dst), aux=AUX_ADDR64 | signed
    )


@decodes("st")
def store(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    row, off, wide = c.address(i.args[0])
    words = []
    for s in items(i.args[1]):
        words += [c.src(s, t), c.element(s, t)]
    aux = ordering(i.parts) | (AUX_ADDR64 if wide else 0)
    vec = len(words) // 2
    return c.system("st", a=row, imm=off, words=words, space=space_of(i.parts), size=type_size(t), vec=vec, aux=aux)


OPERATIONS = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]
FORMATS = {
    "u32": 0, "b32": 0, "s32": 1, "u64": 2, "b64": 2, "s64": 3, "f32": 4, "f64": 5, "f16x2": 6, "bf16x2": 7,
    "f16": 8, "bf16": 9,
}  # fmt: skip


@decodes("atom", "red")
def atomic(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    if t not in FORMATS or "async" in i.parts:
        raise Unsupported(i.op)
    operation = next(OPERATIONS.index(p) for p in i.parts if p in OPERATIONS)
    args = list(i.args) if i.parts[0] == "atom" else [SINK, *i.args]
    row, off, wide = c.address(args[1])
    values = items(args[2])
    dst = items(args[0]) if args[0] is not SINK else (SINK,) * len(values)
    compare = items(args[3]) if OPERATIONS[operation] == "cas" else ()
    words = []
    for d in dst:
        words += [NONE, 4] if d is SINK else [c.dst(d, t), c.element(d, t)]
    for s in (*values, *compare):
        words += [c.src(s, t), c.element(s, t)]
    aux = (ordering(i.parts) or AUX_STRONG) | (AUX_ADDR64 if wide else 0)
    return c.system(
        "atom",
        d=operation | FORMATS[t] << 8,
        a=row,
        imm=off,
        words=words,
        space=space_of(i.parts),
        size=type_size(t),
        vec=len(values),
        aux=aux,
    )


# SHAPE_* of matrix.c, by the shape and the bits of an element in shared memory.
MATRIX_SHAPES = {
    ("m8n8", 16): 0, ("m16n16", 8): 1, ("m8n16", 4): 2, ("m8n16", 6): 3, ("m16n8", 8): 4, ("m16n16", 4): 5,
    ("m16n16", 6): 6,
}  # fmt: skip
ELEMENT_BITS = {"b16": 16, "b8": 8, "b6x16_p32": 6, "b4x16_p64": 4}
# Targets with ldmatrix and stmatrix of 8-, 6- and 4-bit elements (PTX ISA, "ldmatrix" and "stmatrix", target notes).
WITH_NARROW_MATRICES = ("sm_10", "sm_11", "sm_12")


@decodes("ldmatrix", "stmatrix")
def matrix(c: Context, i: Instr) -> Op:
    is_load = i.parts[0] == "ldmatrix"
    mem, regs = (i.args[1], i.args[0]) if is_load else (i.args[0], i.args[1])
    shape = MATRIX_SHAPES.get((i.parts[3], ELEMENT_BITS.get(i.parts[-1], 0)))
    if shape is None or ((i.parts[3] == "m16n16") and "trans" not in i.parts):
        raise Unsupported(i.op)
    target = c.file.kernel.target
    if i.parts[-1] != "b16" and not target.startswith(WITH_NARROW_MATRICES):
        raise Unsupported(f"{i.op} on {target}, which has matrices of 16 bits only")
    row, off, wide = c.address(mem)
    words = [c.dst(r, "b32") if is_load else c.src(r, "b32") for r in items(regs)]
    count = next(int(p[1:]) for p in i.parts if p in ("x1", "x2", "x4"))
    return c.system(
        i.parts[0],
        a=row,
        imm=off,
        words=words,
        size=shape,
        vec=count,
        space=int("trans" in i.parts),
        aux=AUX_ADDR64 if wide else 0,
    )


@decodes("isspacep")
def isspacep(c: Context, i: Instr) -> Op:
    space = i.parts[1]
    window = {"shared": 1, "local": 2, "param": 4}.get(space.split("::")[0], 0)
    own_cta = int(space == "shared::cta")
    return c.system("isspacep", d=c.pred_dst(i.args[0]), a=c.src(i.args[1], "u64"), imm=window, aux=own_cta)


@decodes("mapa", "getctarank")
def cluster_address(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    rows = [c.src(i.args[1], t)]
    if i.parts[0] == "mapa":
        rows.append(c.src(i.args[2], "u32"))
        d = c.dst(i.args[0], t)
    else:
        d = c.dst(i.args[0], "u32")
    return c.system(i.parts[0], d, *rows, size=type_size(t))


@decodes("prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "ld.global.prefetch")
def cache_hint(c: Context, i: Instr) -> Op:
    """Decode a cache hint, which changes no value. Only other hints read the opaque word that createpolicy writes."""
    if i.parts[0] == "createpolicy":
        return c.lane("mov_b64", c.dst(i.args[0], "b64"), c.file.constant("d", 0))
    return c.nop()
