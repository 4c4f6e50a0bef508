"""e2m1 rounding and packing against exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hopwell.layouts import E2M1_MAGNITUDES, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1

FORMAT = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of the OCP microscaling specification
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def nearest_code(x):
    """Round a Python float by definition: least exact distance, then the even code."""
    if math.isnan(x):
        return 7
    sign = 8 if math.copysign(1, x) < 0 else 0
    magnitude = Fraction(min(abs(x), 6.0))
    return sign + min(range(8), key=lambda code: (abs(Fraction(FORMAT[code]) - magnitude), code % 2))


def test_magnitudes():
    assert list(E2M1_MAGNITUDES) == FORMAT


def test_decode_all_codes():
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == FORMAT + [-v for v in FORMAT]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    x = bits.view(dtype)
    codes = encode_e2m1(x)
    assert codes.dtype == torch.uint8
    # float64 holds 16-bit numbers and their distances to e2m1 values near a midpoint exactly.
    distance = (x.double().abs().clamp(max=6)[:, None] - torch.tensor(FORMAT, dtype=torch.float64)).abs()
    penalty = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64)
    tied = distance == distance.amin(1, keepdim=True)
    expected = torch.where(tied, penalty, 2.0).argmin(1) + 8 * (bits < 0)
    expected[x.isnan()] = 7
    assert torch.equal(codes.long(), expected)


@given(st.floats(width=32))
@example(float("nan"))
@example(float("-inf"))
@example(-0.0)
def test_single_numbers(x):
    assert encode_e2m1(torch.tensor([x])).item() == nearest_code(x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("midpoint", MIDPOINTS)
def test_ties_and_their_neighbours(midpoint, sign):
    centre = torch.tensor(midpoint)
    x = sign * torch.stack(
        [torch.nextafter(centre, torch.tensor(0.0)), centre, torch.nextafter(centre, torch.tensor(9.0))]
    )
    below, tie, above = (code % 8 for code in encode_e2m1(x).tolist())
    assert above == below + 1
    assert FORMAT[below] < midpoint < FORMAT[above]
    assert tie in (below, above)
    assert tie % 2 == 0


@given(st.lists(st.integers(0, 15), max_size=12).filter(lambda codes: len(codes) % 2 == 0))
def test_pack_low_nibble_first(codes):
    packed = pack_e2m1(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2)]
    assert unpack_e2m1(packed).tolist() == codes


def test_pack_keeps_leading_dimensions_and_takes_strides():
    codes = torch.arange(2 * 3 * 8, dtype=torch.uint8).view(2, 3, 8) % 16
    strided = torch.stack((codes, codes * 0), dim=-1)[..., 0]
    packed = pack_e2m1(strided)
    assert tuple(packed.shape) == (2, 3, 4)
    assert packed.is_contiguous()
    assert torch.equal(unpack_e2m1(packed), codes)
    assert torch.equal(unpack_e2m1(packed[..., 1:]), codes[..., 2:])


BYTES = torch.zeros(4, dtype=torch.uint8)
BAD = {
    "encode type": (lambda: encode_e2m1(1.0), TypeError, "x must be a torch.Tensor, got float"),
    "encode dtype": (lambda: encode_e2m1(torch.zeros(2, dtype=torch.float64)), TypeError, "x .*got torch.float64"),
    "decode dtype": (lambda: decode_e2m1(torch.zeros(2)), TypeError, "codes must have dtype torch.uint8"),
    "pack dtype": (lambda: pack_e2m1(torch.zeros(2)), TypeError, "codes must have dtype torch.uint8"),
    "pack odd": (lambda: pack_e2m1(BYTES[:3]), ValueError, "codes' last dimension must be a multiple of 2, got 3"),
    "pack scalar": (lambda: pack_e2m1(BYTES[0]), ValueError, "codes must have at least one dimension"),
    "unpack scalar": (lambda: unpack_e2m1(BYTES[0]), ValueError, "packed must have at least one dimension"),
    "unpack dtype": (lambda: unpack_e2m1(torch.zeros(2)), TypeError, "packed must have dtype torch.uint8"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
