"""fp8 quantization against e4m3 built from its definition."""

import bisect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import dequantize_fp8, fp8_scale, quantize_fp8, quantize_nvfp4

# Magnitudes of codes 0..126: exponent bias 7, three mantissa bits, subnormals below 2**-6. Code 127 is NaN.
E4M3 = [(c % 8) * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]


def nearest_e4m3(x):
    """Round a Python float to an e4m3 code: least distance, ties to even, clamped."""
    magnitude = min(abs(x), 448.0)
    upper = bisect.bisect_left(E4M3, magnitude)
    code = min((max(upper - 1, 0), upper), key=lambda c: (abs(E4M3[c] - magnitude), c % 2))
    return code + (128 if math.copysign(1, x) < 0 else 0)


def codes(tensor):
    return tensor.view(torch.uint8).tolist()


def test_definition_agrees_with_torch():
    assert torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist() == E4M3


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.sampled_from([0.25, 1.0, 8.0]))
def test_quantize(values, scale):
    """Scales are powers of two here, so that dividing is exact and every rounding is e4m3's."""
    data = quantize_fp8(torch.tensor(values), scale)
    assert data.dtype == torch.float8_e4m3fn
    assert codes(data) == [nearest_e4m3(v / scale) for v in values]


def test_quantize_ties_and_limits():
    midpoints = [(E4M3[i] + E4M3[i + 1]) / 2 for i in range(126)]
    assert codes(quantize_fp8(torch.tensor(midpoints), 1.0)) == [i + i % 2 for i in range(126)]
    assert codes(quantize_fp8(torch.tensor([464.0, 465.0, 1e30, math.inf, -math.inf]), 1.0)) == [126] * 4 + [254]
    assert quantize_fp8(torch.tensor([math.nan]), 1.0).isnan().all()


@given(st.lists(st.integers(0, 255).filter(lambda c: c % 128 != 127), min_size=1, max_size=8), st.floats(0.01, 100))
def test_dequantize(bits, scale):
    data = torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale32 = torch.tensor(scale)
    expected = [math.copysign(E4M3[b % 128], 127.5 - b) for b in bits]
    for given_scale in (scale32, scale32.view(1, 1), float(scale32)):
        values = dequantize_fp8(data, given_scale)
        assert values.dtype == torch.float32
        assert values.tolist() == (torch.tensor(expected, dtype=torch.float32) * scale32).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(dtype):
    x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = fp8_scale(x)
    assert scale.dtype == torch.float32
    assert scale.dim() == 0
    assert float(scale) == pytest.approx(float(x.float().abs().max()) / 448, rel=1e-6)
    assert fp8_scale(-x) == scale
    back = dequantize_fp8(quantize_fp8(x, scale), scale, dtype)
    assert back.dtype == dtype
    error = (back.double() - x.double()).abs()
    # Half a step of three mantissa bits, or half the smallest subnormal, and the rounding to dtype.
    assert (error <= x.double().abs() * 2.0**-4 * 1.1 + float(scale) * 2.0**-10).all()
    assert error.max() > 0


def test_scale_of_nothing():
    assert fp8_scale(torch.zeros(3)).item() == 1
    assert fp8_scale(-torch.zeros(3)).item() == 1
    assert fp8_scale(torch.empty(0)).item() == 1
    assert fp8_scale(torch.tensor([1.0, math.nan])).isnan()


X = torch.ones(2)
DATA = X.to(torch.float8_e4m3fn)
BAD = {
    "x type": (lambda: quantize_fp8([1.0], 1.0), TypeError, "x must be a torch.Tensor"),
    "x dtype": (lambda: quantize_fp8(X.double(), 1.0), TypeError, "x must have dtype"),
    "scale zero": (lambda: quantize_fp8(X, 0.0), ValueError, "scale must be positive and finite, got 0.0"),
    "scale negative": (lambda: quantize_fp8(X, -1), ValueError, "scale must be positive"),
    "scale nan": (lambda: quantize_fp8(X, math.nan), ValueError, "scale must be positive and finite, got nan"),
    "scale type": (lambda: quantize_fp8(X, "1"), TypeError, "scale must be a float or .*got str"),
    "scale bool": (lambda: quantize_fp8(X, True), TypeError, "got bool"),
    "scale dtype": (lambda: quantize_fp8(X, X[0].double()), TypeError, "scale must have dtype torch.float32"),
    "scale numel": (lambda: quantize_fp8(X, X), ValueError, r"scale must have one element, got shape \(2,\)"),
    "data dtype": (lambda: dequantize_fp8(X, 1.0), TypeError, "data must have dtype torch.float8_e4m3fn"),
    "to dtype": (lambda: dequantize_fp8(DATA, 1.0, torch.int8), TypeError, "dtype must be .*got torch.int8"),
    "of dtype": (lambda: fp8_scale(DATA), TypeError, "x must have dtype"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.3, 7.0, 1e-3])
def test_codes_are_the_same_on_every_device(scale: float) -> None:
    """A GPU's product with the reciprocal of the scale would give other codes."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    bytes_of = [part.view(torch.uint8) for part in (quantize_fp8(x, scale), *quantize_nvfp4(x, scale))]
    on_gpu = [part.view(torch.uint8) for part in (quantize_fp8(x.cuda(), scale), *quantize_nvfp4(x.cuda(), scale))]
    for here, there in zip(bytes_of, on_gpu, strict=True):
        assert torch.equal(here, there.cpu())
