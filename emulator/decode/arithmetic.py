"""Decoders of per-lane instructions: each chooses a native lane function and its operands."""

from __future__ import annotations

from ..errors import Unsupported
from ..native.layout import AUX_MOVE, NONE
from ..ptx import SINK, Imm, Instr, Pair, Reg, Special, Vec
from .op import Context, Op, decodes
from .registers import ELEMENT

INTEGER = {"u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"}
ROUNDING = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
FTZ, SAT, RELU = 1, 2, 32  # ANY_* of alu_float.c; bits 2..3 hold the rounding mode


def bits(type_name: str) -> str:
    return type_name[1:]


def simple(c: Context, i: Instr, name: str, type_name: str, imm: int = 0, dst_type: str | None = None) -> Op:
    """Decode an instruction that has a destination, then up to four sources of one type."""
    rows = [c.src(a, type_name) for a in i.args[1:]]
    rows += [NONE] * (4 - len(rows))
    return c.lane(name, c.dst(i.args[0], dst_type or type_name), *rows, imm=imm)


def float_flags(i: Instr) -> int:
    mode = next((ROUNDING[p] for p in i.parts if p in ROUNDING), 0)
    return (
        (FTZ if "ftz" in i.parts else 0)
        | (SAT if "sat" in i.parts else 0)
        | mode << 2
        | (RELU if "relu" in i.parts else 0)
    )


# ------------------------------------------------------------------ add, sub, mul, fma, ...
@decodes("add", "sub", "mul", "fma", "fms", "fnma", "mad", "div")
def arithmetic(c: Context, i: Instr) -> Op:
    """Decode additions, products and their kin. contraction.py makes ``fms`` and ``fnma``."""
    o, t = i.parts[0], i.parts[-1]
    if t in INTEGER:
        return integer(c, i, o, t)
    if t in ("bf16", "f16") and "f32" in i.parts:
        return mixed(c, i, "fma" if o == "mad" else o, t)
    o = "fma" if o == "mad" else o
    if o == "div":  # approximate divisions are separate operations
        o += next((f"_{p}" for p in i.parts if p in ("approx", "full")), "")
    if t in ("f16", "f16x2", "bf16", "bf16x2"):
        return simple(c, i, f"{o}_{t}", t, float_flags(i) & ~(3 << 2))
    if t in ("f32", "f32x2"):
        flags = float_flags(i)
        if flags == 0:
            return simple(c, i, f"{o}_{t}", t)
        if flags == FTZ:
            return simple(c, i, f"{o}_ftz_{t}", t)
        return simple(c, i, f"{o}_any_{t}", t, flags)
    if t == "f64":
        return simple(c, i, f"{o}_f64", t)
    if t in ("u16x2", "s16x2") and o == "add":
        return simple(c, i, "add_b16x2", "b32")
    raise Unsupported(i.op)


def mixed(c: Context, i: Instr, o: str, t: str) -> Op:
    """Decode an instruction with an f32 result and 16-bit operands (sm_100): add.f32.bf16, fma.rn.f32.f16."""
    n = 2 if o == "fma" else 1
    rows = [c.src(a, t) for a in i.args[1 : 1 + n]] + [c.src(i.args[1 + n], "f32")]
    return c.lane(f"{o}_f32_{t}", c.dst(i.args[0], "f32"), *rows)


def integer(c: Context, i: Instr, o: str, t: str) -> Op:
    w = bits(t)
    if o == "div":
        return simple(c, i, f"div_{t}", t)
    if "cc" in i.parts:  # add.cc, sub.cc, mad.*.cc: the carry is in a predicate of its own
        if o == "mad":
            raise Unsupported(i.op)
        carry = c.file.predicate("carry")
        a, b = c.src(i.args[1], t), c.src(i.args[2], t)
        c.defs.append(5 << 28 | carry)
        return c.lane(f"{o}c_b{w}", c.dst(i.args[0], t), a, b, d2=carry)
    if o in ("mul", "mad") and "wide" in i.parts:
        wide = f"{t[0]}{2 * int(w)}"
        rows = [c.src(i.args[1], t), c.src(i.args[2], t)]
        if o == "mad":
            rows.append(c.src(i.args[3], wide))
        return c.lane(f"{o}_wide_{t}", c.dst(i.args[0], wide), *rows)
    if o in ("mul", "mad"):
        part = f"hi_{t}" if "hi" in i.parts else f"lo_b{w}"
        return simple(c, i, f"{o}_{part}", t)
    if "sat" in i.parts:
        return simple(c, i, f"{o}_sat_{t}", t)
    return simple(c, i, f"{o}_b{w}", t)


@decodes("addc", "subc")
def carry_in(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    carry = c.file.predicate("carry")
    a, b = c.src(i.args[1], t), c.src(i.args[2], t)
    out = NONE
    if "cc" in i.parts:
        out = carry
        c.defs.append(5 << 28 | carry)
    return c.lane(f"{i.parts[0]}_b{bits(t)}", c.dst(i.args[0], t), a, b, NONE, carry, d2=out)


@decodes("rem")
def remainder(c: Context, i: Instr) -> Op:
    return simple(c, i, f"rem_{i.parts[-1]}", i.parts[-1])


@decodes("mul24", "sad")
def small_integer(c: Context, i: Instr) -> Op:
    name = "mul24_lo_u32" if i.parts[0] == "mul24" else f"sad_{i.parts[-1]}"
    return simple(c, i, name, i.parts[-1])


@decodes("min", "max")
def extreme(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    if t in INTEGER:
        return simple(c, i, f"{o}_relu_{t}" if "relu" in i.parts else f"{o}_{t}", t)
    if t in ("s16x2", "u16x2"):
        return simple(c, i, f"{o}_{t}", "b32")
    name = o + ("3" if len(i.args) == 4 else "")
    if "xorsign" in i.parts:
        return simple(c, i, f"{name}_xorsign_abs_{t}", t)
    name += "_nan" if "NaN" in i.parts else ""
    if t in ("f16", "f16x2", "bf16", "bf16x2"):
        return simple(c, i, f"{name}_{t}", t, float_flags(i))
    if "ftz" in i.parts and len(i.args) == 3 and "NaN" not in i.parts:
        name += "_ftz"
    return simple(c, i, f"{name}_{t}", t)


@decodes("neg", "abs")
def sign(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    if t in INTEGER:
        return simple(c, i, f"{o}_s{bits(t)}", t)
    ftz = "_ftz" if "ftz" in i.parts and t == "f32" else ""
    return simple(c, i, f"{o}{ftz}_{t.replace('bf16', 'f16')}", t)


@decodes("copysign")
def copysign(c: Context, i: Instr) -> Op:
    return simple(c, i, f"copysign_{i.parts[-1]}", i.parts[-1])


# ------------------------------------------------------------------ logic and bits
@decodes("and", "or", "xor", "not")
def logic(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    if t != "pred":
        return simple(c, i, f"{o}_b{bits(t)}", t)
    negated, numbers = 0, []
    for k, a in enumerate(i.args[1:]):
        p, inverted = c.pred(a)
        numbers.append(p)
        negated |= inverted << k
    return c.lane(f"{o}_pred", c.pred_dst(i.args[0]), *numbers, imm=negated)


@decodes("cnot")
def cnot(c: Context, i: Instr) -> Op:
    return simple(c, i, f"cnot_b{bits(i.parts[-1])}", i.parts[-1])


@decodes("shl", "shr")
def shift(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    kind = t if o == "shr" and t[0] == "s" else f"{'b' if o == 'shl' else 'u'}{bits(t)}"
    a, n = c.src(i.args[1], t), c.src(i.args[2], "u32")
    return c.lane(f"{o}_{kind}", c.dst(i.args[0], t), a, n)


@decodes("shf", "lop3", "prmt", "fns")
def three_words(c: Context, i: Instr) -> Op:
    o = i.parts[0]
    rows = [c.src(a, "b32") for a in i.args[1:4]]
    d = c.dst(i.args[0], "b32")
    if o == "lop3":
        if isinstance(i.args[0], Pair):
            raise Unsupported(i.op)
        return c.lane("lop3_b32", d, *rows, imm=i.args[4].bits)
    if o == "shf":
        return c.lane(f"shf_{i.parts[1]}_{i.parts[2]}_b32", d, *rows)
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = next((modes.index(p) for p in i.parts if p in modes), None)
    if o == "prmt" and mode is not None:
        return c.lane("prmt_mode_b32", d, *rows, imm=mode)
    return c.lane(f"{o}_b32", d, *rows)


@decodes("bfe", "bfi")
def bit_field(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    n = 1 if i.parts[0] == "bfe" else 2
    rows = [c.src(a, t) for a in i.args[1 : 1 + n]] + [c.src(a, "u32") for a in i.args[1 + n :]]
    return c.lane(f"{i.parts[0]}_{t}", c.dst(i.args[0], t), *rows)


@decodes("popc", "clz", "brev", "bfind")
def bit_count(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    name = f"{o}_{t}" if o == "bfind" else f"{o}_b{bits(t)}"
    if "shiftamt" in i.parts:
        name = "bfind_shift_u32"
    return simple(c, i, name, t, dst_type=t if o == "brev" else "u32")


@decodes("dp4a")
def dot_product(c: Context, i: Instr) -> Op:
    return simple(c, i, f"dp4a_{i.parts[-2]}_{i.parts[-1]}", "b32")


# ------------------------------------------------------------------ comparison and selection
UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
BOOL = {"and": 1, "or": 2, "xor": 3}


@decodes("setp")
def setp(c: Context, i: Instr) -> Op:
    t, compare = i.parts[-1], UNSIGNED_COMPARE.get(i.parts[1], i.parts[1])
    if t[0] == "b" and t[1:].isdigit():
        t = "u" + t[1:]
    combine = next((BOOL[p] for p in i.parts[2:-1] if p in BOOL), 0)
    if t in ("f16x2", "bf16x2") and combine:
        raise Unsupported(i.op)
    a, b = c.src(i.args[1], t), c.src(i.args[2], t)
    third, imm = NONE, combine
    if combine:
        third, negated = c.pred(i.args[3])
        imm |= 4 if negated else 0
    d, d2 = (i.args[0].a, i.args[0].b) if isinstance(i.args[0], Pair) else (i.args[0], None)
    return c.lane(f"setp_{compare}_{t}", c.pred_dst(d), a, b, third, d2=c.pred_dst(d2), imm=imm)


@decodes("testp")
def testp(c: Context, i: Instr) -> Op:
    return c.lane(f"testp_{i.parts[1]}_{i.parts[-1]}", c.pred_dst(i.args[0]), c.src(i.args[1], i.parts[-1]))


@decodes("selp")
def selp(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    a, b = c.src(i.args[1], t), c.src(i.args[2], t)
    p, negated = c.pred(i.args[3])
    if negated:
        a, b = b, a
    return c.lane(f"selp_b{bits(t)[-2:]}" if t != "bf16" else "selp_b16", c.dst(i.args[0], t), a, b, p)


@decodes("slct")
def slct(c: Context, i: Instr) -> Op:
    t, by = i.parts[-2], i.parts[-1]
    a, b = c.src(i.args[1], t), c.src(i.args[2], t)
    return c.lane(f"slct_b{bits(t)}_{by}", c.dst(i.args[0], t), a, b, c.src(i.args[3], by))


# ------------------------------------------------------------------ moves
@decodes("mov")
def mov(c: Context, i: Instr) -> Op:
    t = i.parts[-1]
    d, s = i.args
    if isinstance(d, Vec):
        return unpack(c, i, t, d.items, s)
    if isinstance(s, Vec):
        return pack(c, i, t, d, s.items)
    if t == "pred":
        if isinstance(s, Imm):
            return c.lane("set_pred", c.pred_dst(d), imm=bool(s.bits))
        p, negated = c.pred(s)
        return c.lane("mov_pred", c.pred_dst(d), p, imm=int(negated))
    if isinstance(s, Special) and s.name in (
        "clock",
        "clock64",
        "globaltimer",
        "clock_hi",
        "globaltimer_lo",
        "globaltimer_hi",
    ):
        return c.system("clock", c.dst(d, t), size=8 if t.endswith("64") else 4)
    if d is not SINK and isinstance(s, Special) and d.kind == "d":
        return c.lane("cvt_u64_u32", c.dst(d, t), c.src(s, "u32"))
    source = c.src(s, t)
    op = c.lane(f"mov_b{8 * ELEMENT[d.kind]}", c.dst(d, t), source)
    op.aux = AUX_MOVE if isinstance(s, (Reg, Imm)) else 0
    return op


PARTS = {
    ("b64", 2): "b32",
    ("b32", 2): "b16",
    ("b64", 4): "b16",
    ("b128", 2): "b64",
    ("b128", 4): "b32",
    ("b32", 4): "b8",
    ("b16", 2): "b8",
}


def unpack(c: Context, i: Instr, t: str, parts: tuple, source) -> Op:
    element = PARTS.get((t, len(parts)))
    if element is None:
        raise Unsupported(i.op)
    a = c.src(source, t)
    rows = [c.dst_or_none(p) for p in parts] + [NONE] * (4 - len(parts))
    name = f"split_{t}_b8" if element == "b8" else f"unpack_{t}_{element}"
    op = c.lane(name, rows[0], a, rows[1], rows[2], rows[3])
    op.aux = AUX_MOVE
    return op


def pack(c: Context, i: Instr, t: str, d: Reg, parts: tuple) -> Op:
    element = PARTS.get((t, len(parts)))
    if element is None:
        raise Unsupported(i.op)
    rows = [c.src(p, element) for p in parts]
    op = c.lane(f"pack_{t}_{element}", c.dst(d, t), *rows)
    op.aux = AUX_MOVE
    return op


# ------------------------------------------------------------------ functions
@decodes("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def function(c: Context, i: Instr) -> Op:
    o, t = i.parts[0], i.parts[-1]
    if t in ("f16", "f16x2", "bf16", "bf16x2"):
        return simple(c, i, f"{o}_{t}", t)
    flags = float_flags(i)
    if t == "f32" and "approx" not in i.parts:
        return simple(c, i, f"{o}_any_f32", t, flags)
    ftz = "_ftz" if flags & FTZ and t == "f32" and o in ("ex2", "lg2", "rcp", "rsqrt", "sqrt") else ""
    return simple(c, i, f"{o}{ftz}_{t}", t)


@decodes("cvta")
def cvta(c: Context, i: Instr) -> Op:
    """Decode cvta. Bits 56..58 of a generic address select the window (see core.h)."""
    to_space = i.parts[1] == "to"
    space = i.parts[2] if to_space else i.parts[1]
    window = {"shared": 1, "local": 2, "param": 4}.get(space.split("::")[0], 0)
    wide = i.parts[-1].endswith("64")
    if not wide:
        return simple(c, i, "mov_b32", "b32")
    a = i.args[1]
    narrow = isinstance(a, Reg) and a.kind == "r"
    if narrow:
        raise Unsupported(i.text)
    source = c.src(a, "u64")
    d = c.dst(i.args[0], "u64")
    if window == 0:
        return c.lane("mov_b64", d, source)
    if to_space:
        return c.lane("and_b64", d, source, c.file.constant("d", 0xFFFFFFFF))
    return c.lane("or_b64", d, source, c.file.constant("d", window << 56))
