"""Compares single instructions on a GPU with the emulator's model of them, over dense grids of inputs.

Each instruction becomes a kernel that applies it to the bit patterns start, start + step, ... The same compiled kernel
runs on the GPU and in the emulator, so any difference comes from the instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Instruction:
    """One instruction to compare.

    ``text`` is PTX with %x for the 32-bit input and %r for the 32-bit result. ``kind`` selects the comparison of
    results.
    """

    name: str
    text: str
    kind: str = "f32"  # f32, f16x2, bf16x2 (ulp distance), bits (equal or not)


def _pair(name: str, to: str, modifiers: str = "") -> Instruction:
    """Return the cvt of one f32 into both halves of a packed register."""
    return Instruction(f"cvt.rn{modifiers}.{to}.f32", f"cvt.rn{modifiers}.{to}.f32 %r, %x, %x;", "bits")


def _narrow(to: str) -> Instruction:
    text = f"{{ .reg .b16 h; cvt.rn.satfinite.{to}.f32 h, %x, %x; cvt.u32.u16 %r, h; }}"
    return Instruction(f"cvt.rn.satfinite.{to}.f32", text, "bits")


def _widen(frm: str) -> Instruction:
    text = f"{{ .reg .b16 h; cvt.u16.u32 h, %x; cvt.rn.f16x2.{frm} %r, h; }}"
    return Instruction(f"cvt.rn.f16x2.{frm}", text, "bits")


INSTRUCTIONS = (
    *(Instruction(f"{op}.f32", f"{op}.f32 %r, %x;") for op in (
        "ex2.approx.ftz", "ex2.approx", "lg2.approx.ftz", "lg2.approx", "rcp.approx.ftz", "rsqrt.approx.ftz",
        "sqrt.approx.ftz", "tanh.approx", "sin.approx", "cos.approx",
    )),
    Instruction("ex2.approx.f16x2", "ex2.approx.f16x2 %r, %x;", "f16x2"),
    Instruction("ex2.approx.ftz.bf16x2", "ex2.approx.ftz.bf16x2 %r, %x;", "bf16x2"),
    Instruction("tanh.approx.f16x2", "tanh.approx.f16x2 %r, %x;", "f16x2"),
    Instruction("tanh.approx.bf16x2", "tanh.approx.bf16x2 %r, %x;", "bf16x2"),
    Instruction("div.full.f32 (1 / x)", "{ .reg .f32 one; mov.f32 one, 0f3F800000; div.full.f32 %r, one, %x; }"),
    Instruction("fma.rn.f32 (x, x, x)", "fma.rn.f32 %r, %x, %x, %x;", "bits"),
    Instruction("add.rn.f16x2 (x, x)", "add.rn.f16x2 %r, %x, %x;", "bits"),
    Instruction("fma.rn.bf16x2 (x, x, x)", "fma.rn.bf16x2 %r, %x, %x, %x;", "bits"),
    Instruction("max.f32 (x, 0)", "{ .reg .f32 z; mov.f32 z, 0f00000000; max.f32 %r, %x, z; }", "bits"),
    Instruction("cvt.rna.tf32.f32", "cvt.rna.tf32.f32 %r, %x;", "bits"),
    Instruction("cvt.rni.s32.f32", "cvt.rni.s32.f32 %r, %x;", "bits"),
    Instruction("cvt.rzi.u32.f32", "cvt.rzi.u32.f32 %r, %x;", "bits"),
    _pair("bf16x2", "bf16x2"),
    _pair("f16x2", "f16x2"),
    _pair("relu", "bf16x2", ".relu"),
    _narrow("e4m3x2"),
    _narrow("e5m2x2"),
    _widen("e4m3x2"),
    _widen("e5m2x2"),
)  # fmt: skip


@dataclass
class Comparison:
    """Results of one instruction. ``ulp`` counts differing results by distance in units of the last place."""

    name: str
    values: int
    equal: int
    ulp: dict[int, int]
    largest_relative: float
    first_difference: tuple[int, int, int] | None  # input, hardware, emulator

    def row(self) -> str:
        distances = ", ".join(f"{d}: {n}" for d, n in sorted(self.ulp.items())[:6])
        first = (
            ""
            if self.first_difference is None
            else "x={:#010x} gpu={:#010x} emu={:#010x}".format(*self.first_difference)
        )
        share = f"{100 * self.equal / self.values:.4f} %"
        cells = (self.name, str(self.values), share, distances or "-", f"{self.largest_relative:.2e}", first)
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| instruction | inputs | bit-equal | results by ulp distance | largest relative distance | first difference |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def _ordered(x: np.ndarray, bits: int) -> np.ndarray:
    """Return floating-point bit patterns as integers in the order of their values."""
    sign = 1 << (bits - 1)
    x = x.astype(np.int64)
    return np.where(x & sign, -(x & (sign - 1)), x)


def compare(name: str, kind: str, inputs: np.ndarray, gpu: np.ndarray, model: np.ndarray) -> Comparison:
    """Compare 32-bit results; NaNs of any payload are equal in floating-point kinds."""
    same = gpu == model
    ulp: dict[int, int] = {}
    relative = 0.0
    if kind != "bits":
        parts = [(gpu, model, 32)] if kind == "f32" else [
            (gpu >> s & 0xFFFF, model >> s & 0xFFFF, 16) for s in (0, 16)
        ]  # fmt: skip
        same = np.ones(len(gpu), bool)
        for g, e, bits in parts:
            gf, ef = (_floats(v, kind) for v in (g, e))
            both_nan = np.isnan(gf) & np.isnan(ef)
            d = np.abs(_ordered(g, bits) - _ordered(e, bits))
            d[both_nan] = 0
            same &= d == 0
            for distance, n in zip(*np.unique(d[d > 0], return_counts=True), strict=True):
                ulp[int(distance)] = ulp.get(int(distance), 0) + int(n)
            with np.errstate(all="ignore"):
                r = np.abs(gf.astype(np.float64) - ef) / np.abs(ef)
            r = r[np.isfinite(r)]
            relative = max(relative, float(r.max()) if r.size else 0.0)
    bad = np.flatnonzero(~same)
    first = (int(inputs[bad[0]]), int(gpu[bad[0]]), int(model[bad[0]])) if bad.size else None
    return Comparison(name, len(gpu), int(same.sum()), ulp, relative, first)


def _floats(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f32":
        return x.astype(np.uint32).view(np.float32)
    if kind == "f16x2":
        return x.astype(np.uint16).view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def inputs_of(count: int, start: int = 0) -> tuple[int, np.ndarray]:
    """Return (step, bit patterns); an odd step lets the patterns cover the whole 32-bit range and every low bit."""
    step = (2**32 // count) | 1
    return step, (start + step * np.arange(count, dtype=np.uint64)).astype(np.uint32)
