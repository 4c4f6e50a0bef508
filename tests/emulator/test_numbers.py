"""Number formats: every code decoded, dense encodings compared with torch's own conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.device.ptx import run_ptx

N = 4096


def convert(text: str, x: np.ndarray) -> np.ndarray:
    """Apply PTX text (%x 32-bit in, %z 32-bit out) to bit patterns."""
    source = torch.from_numpy(x.astype(np.uint32).view(np.int32).copy())
    target = torch.zeros(len(x), dtype=torch.int32)
    body = (
        "mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 7; add.u32 %r1, %r1, %tid; mul.wide.u32 %d1, %r1, 4;\n"
        "add.u64 %d2, %a0, %d1; ld.global.b32 %r40, [%d2]; mov.b32 %r50, 0;\n"
        + text.replace("%x", "%r40").replace("%z", "%r50")
        + "\nadd.u64 %d3, %a1, %d1; st.global.b32 [%d3], %r50;"
    )
    run_ptx(body, source, target, grid=len(x) // 128, block=128)
    return target.numpy().view(np.uint32)


def dense() -> np.ndarray:
    """Return float patterns: a stride over all of them, and every value near the boundaries of the small formats."""
    step = np.arange(N // 2, dtype=np.uint64) * (2**32 // (N // 2) + 1)
    near = (np.linspace(-70000, 70000, N // 4)).astype(np.float32).view(np.uint32)
    small = (np.linspace(-2, 2, N // 4) * 2.0**-6).astype(np.float32).view(np.uint32)
    return np.concatenate([step.astype(np.uint32), near, small])


def test_f32_to_bf16_and_f16_round_to_nearest_even():
    x = dense()
    values = torch.from_numpy(x.view(np.float32).copy())
    for kind, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        got = convert(f"cvt.rn.{kind}.f32 %z, %x, %x;", x) & 0xFFFF
        wanted = values.to(dtype).view(torch.int16).numpy().view(np.uint16)
        nan = np.isnan(x.view(np.float32))
        np.testing.assert_array_equal(got[~nan], wanted[~nan], err_msg=kind)
        assert (got[nan] == 0x7FFF).all()


def test_the_first_operand_goes_to_the_upper_half():
    x = np.full(128, np.float32(2.0).view(np.uint32))
    got = convert("cvt.rn.bf16x2.f32 %z, %x, 0f3F800000;", x)
    assert (got == 0x40003F80).all()


def test_relu_and_rounding_towards_zero():
    x = dense()
    v = x.view(np.float32)
    got = convert("cvt.rz.bf16x2.f32 %z, %x, %x;", x) & 0xFFFF
    keep = np.isfinite(v)
    np.testing.assert_array_equal(got[keep], (x >> 16)[keep])
    got = convert("cvt.rn.relu.bf16x2.f32 %z, %x, %x;", x) & 0xFFFF
    assert not got[v < 0].any()


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_f32_to_fp8_saturates(kind, dtype):
    x = dense()
    v = x.view(np.float32)
    got = convert(f"{{ .reg .b16 h; cvt.rn.satfinite.{kind}.f32 h, %x, %x; cvt.u32.u16 %z, h; }}", x) & 0xFF
    top = torch.finfo(dtype).max
    wanted = torch.from_numpy(np.clip(v, -top, top).copy()).to(dtype).view(torch.uint8).numpy()
    nan = np.isnan(v)
    np.testing.assert_array_equal(got[~nan], wanted[~nan])
    assert (got[nan] == 0x7F).all()


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_every_fp8_code_widens_exactly(kind, dtype):
    codes = np.arange(256, dtype=np.uint32)
    got = convert(f"{{ .reg .b16 h; cvt.u16.u32 h, %x; cvt.rn.f16x2.{kind} %z, h; }}", codes) & 0xFFFF
    wanted = (
        torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    )
    nan = np.isnan(wanted.view(np.float16))
    np.testing.assert_array_equal(got[~nan], wanted[~nan])
    assert np.isnan(got[nan].astype(np.uint16).view(np.float16)).all()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def test_e2m1_encodes_to_the_nearest_even_code_and_back():
    x = np.linspace(-8, 8, 1024).astype(np.float32)
    got = convert(
        "{ .reg .b8 h; .reg .b16 w; cvt.rn.satfinite.e2m1x2.f32 h, 0f00000000, %x;\n"
        "mov.b16 w, {h, 0}; cvt.u32.u16 %z, w; }",
        x.view(np.uint32),
    )  # fmt: skip
    for value, code in zip(x, got & 15, strict=True):
        distance = np.abs(E2M1 - abs(value))
        nearest = np.flatnonzero(distance == distance.min())
        wanted = next(k for k in nearest if k % 2 == 0) if len(nearest) > 1 else nearest[0]
        assert code == wanted | (8 if np.signbit(value) else 0), value
    codes = np.arange(256, dtype=np.uint32)
    wide = convert("{ .reg .b16 h; cvt.u16.u32 h, %x; cvt.rn.f16x2.e2m1x2 %z, h; }", codes)
    table = np.concatenate([E2M1, -E2M1]).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(wide & 0xFFFF, table[codes & 15])
    np.testing.assert_array_equal(wide >> 16, table[codes >> 4])


def test_ue8m0_rounds_up_to_a_power_of_two():
    x = np.array([1.0, 1.0001, 2.0, 3.0, 0.75, 2.0**-127, 0.0, np.inf] * 16, np.float32)
    got = convert(
        "{ .reg .b16 h; cvt.rp.satfinite.ue8m0x2.f32 h, 0f00000000, %x; cvt.u32.u16 %z, h; }", x.view(np.uint32)
    )
    assert (got[:8] & 0xFF).tolist() == [127, 128, 128, 129, 127, 0, 0, 254]


def test_tf32_rounds_half_away_from_zero():
    x = np.array([0x3F800FFF, 0x3F801000, 0x3F801001, 0xBF801000] * 32, np.uint32)
    got = convert("cvt.rna.tf32.f32 %z, %x;", x)
    assert got[:4].tolist() == [0x3F800000, 0x3F802000, 0x3F802000, 0xBF802000]


@pytest.mark.parametrize(("op", "rounding"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
def test_float_to_integer_rounds_and_clamps(op, rounding):
    v = np.concatenate([np.linspace(-10, 10, 1021), [3e9, -3e9, np.nan]]).astype(np.float32)
    got = convert(f"cvt.{op}.s32.f32 %z, %x;", v.view(np.uint32)).view(np.int32)
    wanted = np.clip(np.nan_to_num(rounding(v.astype(np.float64))), -(2**31), 2**31 - 1).astype(np.int64)
    np.testing.assert_array_equal(got, wanted)


def test_integer_to_float_and_between_integers():
    x = dense()
    got = convert("cvt.rn.f32.s32 %z, %x;", x).view(np.float32)
    np.testing.assert_array_equal(got, x.view(np.int32).astype(np.float32))
    got = convert("{ .reg .b64 w; cvt.s64.s32 w, %x; shr.s64 w, w, 4; cvt.u32.u64 %z, w; }", x)
    np.testing.assert_array_equal(got, (x.view(np.int32).astype(np.int64) >> 4).astype(np.uint32))
    got = convert("cvt.sat.s8.s32 %z, %x;", x).view(np.int32)
    np.testing.assert_array_equal(got, np.clip(x.view(np.int32), -128, 127))
    got = convert("cvt.s32.s8 %z, %x;", x).view(np.int32)
    np.testing.assert_array_equal(got, (x & 0xFF).astype(np.uint8).view(np.int8))


def test_f16_to_f32_is_exact_for_every_code():
    codes = np.arange(65536, dtype=np.uint32)
    got = convert("{ .reg .b16 h; cvt.u16.u32 h, %x; cvt.f32.f16 %z, h; }", codes).view(np.float32)
    wanted = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(got[~nan], wanted[~nan])
    assert np.isnan(got[nan]).all()


@pytest.mark.parametrize("scale", [127, 133, 129])
def test_signed_bytes_with_six_fractional_bits(scale):
    """PTX ISA 9.1, "cvt": .s2f6x2 has two fractional bytes; each has its own ue8m0 scale. 133 gives integers."""
    codes = np.arange(256, dtype=np.uint32)
    body = (
        f"{{ .reg .b16 h, s; cvt.u16.u32 h, %x; mov.b16 s, {scale | 127 << 8:#x}; "
        "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 %z, h, s; }"
    )
    got = convert(body, codes | (255 - codes) << 8)
    low, high = (got & 0xFFFF) << 16, got & 0xFFFF0000
    signed = codes.astype(np.uint8).view(np.int8).astype(np.float32)
    np.testing.assert_array_equal(low.view(np.float32), signed * np.float32(2.0 ** (scale - 133)))
    np.testing.assert_array_equal(high.view(np.float32), signed[::-1] / 64)


def test_signed_bytes_without_a_scale():
    codes = np.arange(256, dtype=np.uint32)
    got = convert("{ .reg .b16 h; cvt.u16.u32 h, %x; cvt.rn.relu.bf16x2.s2f6x2 %z, h; }", codes)
    signed = codes.astype(np.uint8).view(np.int8).astype(np.float32)
    np.testing.assert_array_equal((got << 16).view(np.float32), np.maximum(signed / 64, 0))
