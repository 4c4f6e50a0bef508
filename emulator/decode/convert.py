"""Decoder of cvt: the general form, and forms with a lane loop of their own."""

from __future__ import annotations

from ..errors import Unsupported
from ..ptx import Instr, type_size
from .op import Context, Op, decodes

TYPES = {
    t: k for k, t in enumerate(["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64", "f16", "bf16", "f32", "f64"])
}
MODES = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
SAT, RELU, FTZ, INTEGRAL = 8, 16, 32, 64  # CVT_* of convert.c
UNSCALED = 0x7F7F  # two ue8m0 codes of 1
NARROW = {"e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2"}
DIRECT = {
    ("u64", "u32"), ("s64", "s32"), ("u32", "u64"), ("u32", "u16"), ("s32", "s16"), ("u16", "u32"), ("f32", "s32"),
    ("f32", "u32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32"), ("f64", "f32"), ("f32", "f64"),
}  # fmt: skip
# Integer conversions that read only the low bits.
SAME_BITS = {
    ("s64", "u32"): "u64_u32", ("u64", "s32"): "s64_s32", ("s32", "u64"): "u32_u64", ("s32", "s64"): "u32_u64",
    ("u32", "s64"): "u32_u64", ("u32", "s16"): "s32_s16", ("s32", "u16"): "u32_u16", ("u16", "s32"): "u16_u32",
    ("s16", "s32"): "u16_u32", ("s16", "u32"): "u16_u32",
}  # fmt: skip


def flags_of(i: Instr) -> int:
    flags = next((MODES[p] for p in i.parts[1:-2] if p in MODES), 0)
    flags |= SAT if "satfinite" in i.parts or "sat" in i.parts else 0
    flags |= RELU if "relu" in i.parts else 0
    flags |= FTZ if "ftz" in i.parts else 0
    flags |= INTEGRAL if any(p in ("rni", "rzi", "rmi", "rpi") for p in i.parts) else 0
    return flags


@decodes("cvt")
def cvt(c: Context, i: Instr) -> Op:
    to, frm = i.parts[-2], i.parts[-1]
    if "pack" in i.parts or "rs" in i.parts:
        raise Unsupported(i.op)
    flags = flags_of(i)
    if to == "tf32":
        kind = "relu" if flags & RELU else next((p for p in i.parts if p in ("rna", "rn", "rz")), "rna")
        return c.lane(f"cvt_tf32_{kind}", c.dst(i.args[0], "b32"), c.src(i.args[1], "f32"))
    if to in ("f16x2", "bf16x2") and frm == "f32":
        return pair(c, i, to, flags)
    if to in NARROW and frm == "f32":
        a, b = c.src(i.args[1], "f32"), c.src(i.args[2], "f32")
        return c.lane(f"cvt_{to}_f32", c.dst(i.args[0], "b16"), a, b, imm=flags)
    if to in NARROW and frm in ("f16x2", "bf16x2"):
        return c.lane(f"cvt_{to}_{frm}", c.dst(i.args[0], "b16"), c.src(i.args[1], "b32"), imm=flags)
    if to in ("f16x2", "bf16x2") and frm in NARROW:
        return c.lane(f"cvt_{to}_{frm}", c.dst(i.args[0], "b32"), c.src(i.args[1], "b16"), imm=flags)
    if (to, frm) == ("bf16x2", "s2f6x2"):  # PTX ISA 9.1
        scale = c.src(i.args[2], "b16") if "scaled::n2::ue8m0" in i.op else c.file.constant("h", UNSCALED)
        return c.lane("cvt_bf16x2_s2f6x2", c.dst(i.args[0], "b32"), c.src(i.args[1], "b16"), scale, imm=flags)
    if to not in TYPES or frm not in TYPES or "scaled" in i.op:
        raise Unsupported(i.op)
    return scalar(c, i, to, frm, flags)


def pair(c: Context, i: Instr, to: str, flags: int) -> Op:
    a, b = c.src(i.args[1], "f32"), c.src(i.args[2], "f32")
    d = c.dst(i.args[0], "b32")
    if flags == 0:
        return c.lane(f"cvt_{to}_f32", d, a, b)
    if flags == MODES["rz"] and to == "bf16x2":
        return c.lane("cvt_bf16x2_rz_f32", d, a, b)
    return c.lane(f"cvt_{to}_any", d, a, b, imm=flags)


def scalar(c: Context, i: Instr, to: str, frm: str, flags: int) -> Op:
    a = c.src(i.args[1], frm)
    d = c.dst(i.args[0], to)
    wide_d, wide_a = c.element(i.args[0], to), c.element(i.args[1], frm)
    exact = wide_d == type_size(to) and wide_a == type_size(frm)
    if exact and flags == 0 and (to, frm) in DIRECT:
        return c.lane(f"cvt_{to}_{frm}", d, a)
    if exact and flags == 0 and (to, frm) in SAME_BITS:
        return c.lane("cvt_" + SAME_BITS[to, frm], d, a)
    imm = flags | TYPES[to] << 8 | TYPES[frm] << 16 | wide_d << 24 | wide_a << 32
    return c.lane("cvt_any", d, a, imm=imm)
