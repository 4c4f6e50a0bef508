"""Per-lane instructions against closed forms, on edge cases and random values, with all lanes and under a mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.device.ptx import run_ptx

RNG = np.random.default_rng(7)
N = 128
EDGES = [0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x00FF00FF, 0x12345678]


def words(seed: int, width: int = 32) -> np.ndarray:
    """Return bit patterns: edges first, then random ones."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**width, N, dtype=np.uint64)
    edges = np.array(EDGES, np.uint64)
    x[: len(edges)] = np.roll(edges, seed) if width == 32 else np.roll(edges, seed) << np.uint64(32) * (seed % 2)
    return x


def floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(N) * 10.0 ** rng.integers(-3, 4, N)).astype(np.float32)
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3.4e38, 0.5, 1.5, 2.5, -2.5]
    x[: len(special)] = np.roll(special, seed)
    return x


def tensor(x: np.ndarray) -> torch.Tensor:
    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    return torch.from_numpy(x.view(signed).copy())


def apply(text: str, *operands: np.ndarray, out: int = 4, masked: bool = False) -> np.ndarray:
    """Apply PTX text with %x0.. and %z to arrays of 2-, 4- or 8-byte elements; bits of the results."""
    kind = {2: "h", 4: "r", 8: "d"}
    result = np.zeros(N, {2: np.uint16, 4: np.uint32, 8: np.uint64}[out])
    lines = []
    for k, x in enumerate(operands):
        w = x.dtype.itemsize
        lines.append(
            f"mul.wide.u32 %d1, %tid, {w}; add.u64 %d1, %a{k}, %d1; ld.global.b{8 * w} %{kind[w]}{40 + k}, [%d1];"
        )
        text = text.replace(f"%x{k}", f"%{kind[w]}{40 + k}")
    z = f"%{kind[out]}50"
    lines.append(f"mov.b{8 * out} {z}, 0;")
    guard = "setp.eq.u32 %p30, 0, 1; and.b32 %r3, %tid, 3; setp.lt.u32 %p30, %r3, 2;" if masked else ""
    body = text.replace("%z", z)
    if masked:
        body = "".join(f"@%p30 {s.strip()};" for s in body.split(";") if s.strip())
    lines += [guard, body]
    lines.append(
        f"mul.wide.u32 %d2, %tid, {out}; add.u64 %d2, %a{len(operands)}, %d2; st.global.b{8 * out} [%d2], {z};"
    )
    target = tensor(result)
    run_ptx("\n".join(lines), *[tensor(x) for x in operands], target, block=N)
    return target.numpy().view(result.dtype)


def check(text: str, expect, *operands: np.ndarray, out: int = 4) -> None:
    """Check PTX text against ``expect``, which maps one Python value per operand to the result's bits."""
    wanted = np.array(
        [expect(*v) & (2 ** (8 * out) - 1) for v in zip(*[o.tolist() for o in operands], strict=True)], np.uint64
    )
    got = apply(text, *operands, out=out)
    np.testing.assert_array_equal(got.astype(np.uint64), wanted, err_msg=text)
    half = apply(text, *operands, out=out, masked=True)
    on = np.arange(N) % 4 < 2
    np.testing.assert_array_equal(half.astype(np.uint64), np.where(on, wanted, 0), err_msg=f"{text} under a mask")


def s32(x: int) -> int:
    return x - 2**32 if x & 2**31 else x


def s64(x: int) -> int:
    return x - 2**64 if x & 2**63 else x


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


A, B, C = (words(k).astype(np.uint32) for k in (1, 2, 3))
LA, LB = (words(k, 64) for k in (4, 5))

INTEGER = {
    "add.s32 %z, %x0, %x1;": lambda a, b: a + b,
    "sub.u32 %z, %x0, %x1;": lambda a, b: a - b,
    "mul.lo.s32 %z, %x0, %x1;": lambda a, b: a * b,
    "mul.hi.u32 %z, %x0, %x1;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %z, %x0, %x1;": lambda a, b: s32(a) * s32(b) >> 32,
    "min.s32 %z, %x0, %x1;": lambda a, b: min(s32(a), s32(b)),
    "max.u32 %z, %x0, %x1;": max,
    "min.relu.s32 %z, %x0, %x1;": lambda a, b: max(0, min(s32(a), s32(b))),
    "and.b32 %z, %x0, %x1;": lambda a, b: a & b,
    "or.b32 %z, %x0, %x1;": lambda a, b: a | b,
    "xor.b32 %z, %x0, %x1;": lambda a, b: a ^ b,
    "shl.b32 %z, %x0, %x1;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %z, %x0, %x1;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 %z, %x0, %x1;": lambda a, b: s32(a) >> min(b, 31),
    "div.u32 %z, %x0, %x1;": lambda a, b: a // b if b else 2**32 - 1,
    "rem.u32 %z, %x0, %x1;": lambda a, b: a % b if b else a,
    "div.s32 %z, %x0, %x1;": lambda a, b: trunc_div(s32(a), s32(b)) if b else -1,
    "rem.s32 %z, %x0, %x1;": lambda a, b: s32(a) - s32(b) * trunc_div(s32(a), s32(b)) if b else a,
    "add.sat.s32 %z, %x0, %x1;": lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) + s32(b))),
    "bfe.u32 %z, %x0, %x1, 5;": lambda a, b: (a >> (b & 255) if (b & 255) < 32 else 0) & 31,
    "prmt.b32 %z, %x0, %x1, 0x7531;": lambda a, b: int.from_bytes(
        ((b << 32) | a).to_bytes(8, "little")[1::2], "little"
    ),
    "shf.l.wrap.b32 %z, %x0, %x1, 7;": lambda a, b: ((b << 32 | a) << 7) >> 32,
    "shf.r.wrap.b32 %z, %x0, %x1, 9;": lambda a, b: (b << 32 | a) >> 9,
}


@pytest.mark.parametrize("text", INTEGER, ids=lambda t: t.split()[0])
def test_integer(text):
    check(text, INTEGER[text], A, B)


UNARY = {
    "not.b32 %z, %x0;": lambda a: ~a,
    "neg.s32 %z, %x0;": lambda a: -a,
    "abs.s32 %z, %x0;": lambda a: abs(s32(a)),
    "popc.b32 %z, %x0;": lambda a: bin(a).count("1"),
    "clz.b32 %z, %x0;": lambda a: 32 - a.bit_length(),
    "brev.b32 %z, %x0;": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %z, %x0;": lambda a: a.bit_length() - 1,
    "bfind.s32 %z, %x0;": lambda a: (~a & 0xFFFFFFFF if s32(a) < 0 else a).bit_length() - 1,
    "prmt.b32 %z, %x0, 0, 0x9111;": lambda a: (0xFF if a & 0x8000 else 0) << 24 | (a >> 8 & 255) * 0x010101,
}


@pytest.mark.parametrize("text", UNARY, ids=lambda t: t.split()[0])
def test_unary(text):
    check(text, UNARY[text], A)


def test_lop3_follows_its_truth_table():
    check(
        "lop3.b32 %z, %x0, %x1, %x2, 0xCA;",  # bitwise select: a ? b : c
        lambda a, b, c: (a & b) | (~a & c),
        A, B, C,
    )  # fmt: skip


def test_multiply_add_and_wide():
    check("mad.lo.s32 %z, %x0, %x1, %x2;", lambda a, b, c: a * b + c, A, B, C)
    check("mul.wide.u32 %z, %x0, %x1;", lambda a, b: a * b, A, B, out=8)
    check("mul.wide.s32 %z, %x0, %x1;", lambda a, b: s32(a) * s32(b), A, B, out=8)
    check("mad.wide.u32 %z, %x0, %x1, %x2;", lambda a, b, c: a * b + c, A, B, LA, out=8)


def test_64_bit():
    check("add.s64 %z, %x0, %x1;", lambda a, b: a + b, LA, LB, out=8)
    check("mul.lo.s64 %z, %x0, %x1;", lambda a, b: a * b, LA, LB, out=8)
    check("mul.hi.u64 %z, %x0, %x1;", lambda a, b: a * b >> 64, LA, LB, out=8)
    check("mul.hi.s64 %z, %x0, %x1;", lambda a, b: s64(a) * s64(b) >> 64, LA, LB, out=8)
    check("shl.b64 %z, %x0, %x1;", lambda a, b: a << b if b < 64 else 0, LA, B, out=8)
    check("div.u64 %z, %x0, %x1;", lambda a, b: a // b if b else 2**64 - 1, LA, LB, out=8)


def test_carry_chain():
    text = "add.cc.u32 %r60, %x0, %x1; addc.u32 %z, %x0, 0;"
    got = apply(text, A, B)
    wanted = (A.astype(np.uint64) + ((A.astype(np.uint64) + B) >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    np.testing.assert_array_equal(got, wanted.astype(np.uint32))


def test_16_bit():
    a, b = (A & 0xFFFF).astype(np.uint16), (B >> 16).astype(np.uint16)
    check("add.u16 %z, %x0, %x1;", lambda x, y: x + y, a, b, out=2)
    check("mul.wide.u16 %z, %x0, %x1;", lambda x, y: x * y, a, b)


def test_pack_and_unpack():
    check("mov.b64 %z, {%x0, %x1};", lambda a, b: b << 32 | a, A, B, out=8)
    check("mov.b64 {%r60, %z}, %x0;", lambda a: a >> 32, LA)
    check("mov.b32 {%h60, %h61}, %x0; mov.b32 %z, {%h61, %h60};", lambda a: a << 16 | a >> 16, A)


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("op", COMPARE)
@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_compare_and_select(op, kind):
    read = s32 if kind == "s32" else int
    truth = eval(f"lambda a, b: a {COMPARE[op]} b")
    text = f"setp.{op}.{kind} %p1, %x0, %x1; selp.b32 %z, 11, 22, %p1;"
    check(
        text,
        lambda a, b: 11 if truth(read(a), read(b)) else 22,
        np.roll(A, 1),
        np.where(np.arange(N) % 3 == 0, np.roll(A, 1), B),
    )


def test_compare_with_boolean_and_second_destination():
    text = (
        "setp.gt.u32 %p2, %x1, 5; setp.lt.and.u32 %p1|%p3, %x0, %x1, %p2;\n"
        "selp.b32 %z, 1, 0, %p1; @%p3 add.u32 %z, %z, 2;"
    )
    got = apply(text, A, B)
    wanted = [
        (1 if a < b and b > 5 else 0) + (2 if not a < b and b > 5 else 0)
        for a, b in zip(A.tolist(), B.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(got, wanted)


# ------------------------------------------------------------------ floating point
F, G, H = floats(1), floats(2), floats(3)


def bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32)


def same_floats(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Whether bits are equal, with any NaN equal to any NaN."""
    g, w = got.view(np.float32), wanted.astype(np.float32)
    nan = np.isnan(w)
    np.testing.assert_array_equal(np.isnan(g), nan, err_msg=what)
    np.testing.assert_array_equal(got[~nan], w.view(np.uint32)[~nan], err_msg=what)


FLOAT = {
    "add.f32": lambda a, b: a + b,
    "sub.rn.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "copysign.f32": lambda a, b: np.copysign(b, a),
}


@pytest.mark.parametrize("op", FLOAT)
def test_float(op):
    with np.errstate(all="ignore"):
        same_floats(apply(f"{op} %z, %x0, %x1;", bits(F), bits(G)), FLOAT[op](F, G), op)


def test_fma_rounds_once():
    exact = [
        np.float32(np.nan)
        if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c))
        else np.float32(float(np.longdouble(float(a)) * np.longdouble(float(b)) + np.longdouble(float(c))))
        for a, b, c in zip(F, G, H, strict=True)
    ]
    keep = np.isfinite(F) & np.isfinite(G) & np.isfinite(H)
    got = apply("fma.rn.f32 %z, %x0, %x1, %x2;", bits(F), bits(G), bits(H)).view(np.float32)
    np.testing.assert_array_equal(got[keep], np.array(exact, np.float32)[keep])


def test_flush_to_zero():
    tiny = np.full(N, 1e-40, np.float32)
    assert not apply("add.ftz.f32 %z, %x0, %x0;", bits(tiny)).any()
    assert apply("add.f32 %z, %x0, %x0;", bits(tiny)).all()
    assert (apply("mul.ftz.f32 %z, %x0, %x1;", bits(-tiny), bits(np.ones(N))) == 0x80000000).all()


@pytest.mark.parametrize(("mode", "towards"), [("rz", 0), ("rm", -1), ("rp", 1)])
def test_directed_rounding(mode, towards):
    a, b = np.full(N, 1.0, np.float32), np.full(N, 2.0**-30, np.float32)
    a[1::2] *= -1
    b[2::4] *= -1
    b[3::4] *= -1
    exact = a.astype(np.float64) + b
    wanted = exact.astype(np.float32)
    step = {0: lambda x: np.float32(0), -1: lambda x: np.float32(-np.inf), 1: lambda x: np.float32(np.inf)}[towards]
    for k in range(N):
        too_far = (
            abs(wanted[k]) > abs(exact[k])
            if towards == 0
            else wanted[k] > exact[k]
            if towards < 0
            else wanted[k] < exact[k]
        )
        if too_far:
            wanted[k] = np.nextafter(wanted[k], step(k))
    same_floats(apply(f"add.{mode}.f32 %z, %x0, %x1;", bits(a), bits(b)), wanted, mode)


def test_saturation_and_relu():
    got = apply("add.sat.f32 %z, %x0, %x1;", bits(F), bits(np.zeros(N))).view(np.float32)
    wanted = np.where(np.isnan(F), 0, np.clip(F, 0, 1))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_max_ignore_nan_and_order_zeros(op):
    """PTX ISA, "min": the operand that is not NaN wins; -0 is less than +0."""
    got = apply(f"{op}.f32 %z, %x0, %x1;", bits(F), bits(G))
    a, b = F.copy(), G.copy()
    pick = np.fmin if op == "min" else np.fmax
    wanted = pick(a, b)
    zeros = (a == 0) & (b == 0)
    sign = (np.signbit(a) | np.signbit(b)) if op == "min" else (np.signbit(a) & np.signbit(b))
    wanted[zeros] = np.where(sign[zeros], -0.0, 0.0)
    same_floats(got, wanted, op)
    got = apply(f"{op}.NaN.f32 %z, %x0, %x1;", bits(F), bits(G)).view(np.float32)
    assert np.isnan(got[np.isnan(F) | np.isnan(G)]).all()


def test_float_compare_treats_nan_as_the_isa_says():
    for op, ordered in (("lt", np.less), ("ge", np.greater_equal), ("eq", np.equal)):
        with np.errstate(invalid="ignore"):
            wanted = ordered(F, G)
        got = apply(f"setp.{op}.f32 %p1, %x0, %x1; selp.b32 %z, 1, 0, %p1;", bits(F), bits(G))
        np.testing.assert_array_equal(got, wanted, err_msg=op)
        unordered = wanted | np.isnan(F) | np.isnan(G)
        got = apply(f"setp.{op}u.f32 %p1, %x0, %x1; selp.b32 %z, 1, 0, %p1;", bits(F), bits(G))
        np.testing.assert_array_equal(got, unordered, err_msg=op + "u")


def test_f32x2_computes_both_halves():
    pair = lambda x, y: bits(x).astype(np.uint64) | bits(y).astype(np.uint64) << np.uint64(32)  # noqa: E731
    with np.errstate(all="ignore"):
        got = apply("fma.rn.f32x2 %z, %x0, %x1, %x2;", pair(F, G), pair(G, H), pair(H, F), out=8)
        low = (F.astype(np.float64) * G + H).astype(np.float32)
    keep = np.isfinite(F) & np.isfinite(G) & np.isfinite(H) & (np.abs(low) < 1e30)
    np.testing.assert_allclose(
        (got & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)[keep], low[keep], rtol=1e-6
    )
    got_add = apply("add.rn.f32x2 %z, %x0, %x1;", pair(F, G), pair(G, H), out=8)
    with np.errstate(all="ignore"):
        same_floats((got_add >> np.uint64(32)).astype(np.uint32), G + H, "upper half")


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
    ],
)
def test_functions_are_correctly_rounded_models(op, function):
    x = np.linspace(0.01, 20, N).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = function(x.astype(np.float64)).astype(np.float32)
    got = apply(f"{op} %z, %x0;", bits(x)).view(np.float32)
    distance = np.abs(got.view(np.int32).astype(np.int64) - wanted.view(np.int32))
    assert distance.max() <= 1, op


def test_ex2_special_values():
    x = np.zeros(N, np.float32)
    x[:6] = [np.inf, -np.inf, np.nan, -126.5, -149, 128]
    got = apply("ex2.approx.ftz.f32 %z, %x0;", bits(x)).view(np.float32)
    assert got[0] == np.inf
    assert got[1] == 0
    assert np.isnan(got[2])
    assert got[3] == 0  # subnormal results are flushed
    assert got[5] == np.inf
    assert apply("ex2.approx.f32 %z, %x0;", bits(x)).view(np.float32)[4] == np.float32(2.0**-149)


# ------------------------------------------------------------------ half precision
def test_half_arithmetic_rounds_once():
    """Compare fma in f16x2 and bf16x2 with exact rational arithmetic."""
    from fractions import Fraction

    rng = np.random.default_rng(3)
    for kind, mantissa, encode in (("f16x2", 10, np.float16), ("bf16x2", 7, None)):
        raw = [rng.integers(0x3000, 0x4400, 2 * N).astype(np.uint16) for _ in range(3)]
        if encode is not None:
            values = [r.view(np.float16).astype(np.float64) for r in raw]
        else:
            values = [(r.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for r in raw]
        packed = [r.view(np.uint32) for r in raw]
        got = apply(f"fma.rn.{kind} %z, %x0, %x1, %x2;", *packed).view(np.uint16)
        for k in range(2 * N):
            exact = Fraction(values[0][k]) * Fraction(values[1][k]) + Fraction(values[2][k])
            result = got[k : k + 1]
            v = result.view(np.float16).astype(np.float64)[0] if encode is not None else (
                (result.astype(np.uint32) << 16).view(np.float32).astype(np.float64)[0]
            )  # fmt: skip
            ulp = Fraction(2) ** (math.floor(math.log2(float(exact))) - mantissa)
            assert abs(Fraction(v) - exact) <= ulp / 2, (kind, k)


def test_mixed_precision():
    a = np.full(N, 0x3FC0, np.uint16)  # 1.5 in bf16
    got = apply("add.f32.bf16 %z, %x0, %x1;", a, bits(G)).view(np.float32)
    with np.errstate(all="ignore"):
        same_floats(got.view(np.uint32), np.float32(1.5) + G, "add.f32.bf16")
