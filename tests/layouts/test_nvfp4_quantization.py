"""NVFP4 quantization against scalar code that follows the format's definition."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import (
    KVLayout,
    NVFP4KVCache,
    VScaleLayout,
    dequantize_nvfp4,
    dequantize_nvfp4_kv_cache,
    dequantize_nvfp4_output,
    interleave_v_scales,
    nvfp4_global_scale,
    quantize_nvfp4,
    quantize_nvfp4_kv_cache,
    quantize_nvfp4_output,
)

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [(c % 8) * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def nearest(table, magnitude):
    return min(range(len(table)), key=lambda code: (abs(table[code] - magnitude), code % 2))


def reference_block(y):
    """Quantize 16 float32 numbers: (scale factor code, 16 e2m1 codes)."""
    largest = np.max(np.abs(y)) / np.float32(6)
    sf = nearest(E4M3, min(float(largest), 448.0))
    if sf == 0:
        return 0, [0] * 16
    codes = []
    for v in y:
        scaled = float(v / np.float32(E4M3[sf]))
        codes.append(nearest(E2M1, min(abs(scaled), 6.0)) + (8 if math.copysign(1, scaled) < 0 else 0))
    return sf, codes


def reference(y):
    """Quantize float32 [..., n] (global scale included): packed bytes and scale factor codes, nested lists."""
    blocks = y.reshape(-1, 16)
    quantized = [reference_block(block) for block in blocks]
    data = np.array([[c[2 * i] + 16 * c[2 * i + 1] for i in range(8)] for _, c in quantized], dtype=np.uint8)
    scales = np.array([sf for sf, _ in quantized], dtype=np.uint8)
    shape = y.shape[:-1]
    return data.reshape(*shape, -1).tolist(), scales.reshape(*shape, -1).tolist()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_quantized(blocks, expected):
    data, scales = expected
    assert blocks.data.dtype == torch.uint8
    assert blocks.scales.dtype == torch.float8_e4m3fn
    assert blocks.data.tolist() == data
    assert blocks.scales.view(torch.uint8).tolist() == scales


@given(
    st.lists(st.floats(-5000, 5000, width=32), min_size=16, max_size=16),
    st.floats(2.0**-10, 2.0**10, width=32),
    st.sampled_from([1.0, 2.0**-20, 2.0**-12, 2.0**10]),
)
def test_quantize_any_block(values, global_scale, magnitude):
    """Magnitudes reach scale factors that are 0, subnormal and clamped."""
    x = torch.tensor(values) * magnitude
    assert_quantized(quantize_nvfp4(x, global_scale), reference(x.numpy() / np.float32(global_scale)))


@DTYPES
def test_quantize_tensor(dtype):
    x = normal(3, 2, 48).to(dtype)
    global_scale = nvfp4_global_scale(x)
    expected = reference(x.float().numpy() / global_scale.numpy())
    for scale in (global_scale, global_scale.view(1, 1), float(global_scale)):
        assert_quantized(quantize_nvfp4(x, scale), expected)
    strided = torch.stack((x, x), dim=-1)[..., 0]
    assert_quantized(quantize_nvfp4(strided, global_scale), expected)


@DTYPES
def test_global_scale(dtype):
    x = normal(7, 5).to(dtype)
    scale = nvfp4_global_scale(x)
    assert scale.dtype == torch.float32
    assert scale.dim() == 0
    assert float(scale) == pytest.approx(float(x.float().abs().max()) / 2688, rel=1e-6)
    assert nvfp4_global_scale(-x) == scale
    assert nvfp4_global_scale(torch.zeros(4, dtype=dtype)).item() == 1


def test_zero_tiny_and_broken_blocks():
    x = torch.zeros(5, 16)
    x[1] = -(2.0**-12)  # SF rounds to 0: codes are 0, sign included
    x[2, 3] = math.nan
    x[3, 3] = -math.inf
    x[4] = -0.0
    data, scales = quantize_nvfp4(x, 1.0)
    assert scales[:, 0].view(torch.uint8).tolist() == [0, 0, 127, 126, 0]
    assert data[[0, 1, 4]].eq(0).all()
    values = dequantize_nvfp4(data, scales)
    assert values[2].isnan().all()
    assert values[3].tolist() == [0.0] * 3 + [-2688.0] + [0.0] * 12


@given(
    st.lists(st.integers(0, 255), min_size=24, max_size=24),
    st.lists(st.integers(0, 255).filter(lambda c: c % 128 != 127), min_size=3, max_size=3),
    st.floats(2.0**-10, 2.0**10, width=32),
)
def test_dequantize(data, scales, global_scale):
    """Any bytes can be read, including bytes that quantizing never gives: scale factors may even be negative."""
    values = dequantize_nvfp4(
        torch.tensor(data, dtype=torch.uint8),
        torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn),
        global_scale,
    )
    for i, value in enumerate(values.tolist()):
        code = data[i // 2] >> 4 if i % 2 else data[i // 2] & 15
        sf = E4M3[scales[i // 16] % 128] * (-1 if scales[i // 16] >= 128 else 1)
        expected = E2M1[code % 8] * (-1 if code >= 8 else 1) * sf
        assert value == float(np.float32(expected) * np.float32(global_scale))


@DTYPES
def test_round_trip(dtype):
    x = normal(4, 3, 128).to(dtype)
    scale = nvfp4_global_scale(x)
    data, scales = quantize_nvfp4(x, scale)
    back = dequantize_nvfp4(data, scales, scale, dtype)
    assert back.dtype == dtype
    # Representable values of a block are at most 2 * SF apart, up to the clamp at 6 * SF, and SF rounds by at most
    # 1/16.
    step = scales.float().repeat_interleave(16, -1) * scale
    error = (back.float() - x.float()).abs()
    assert (error <= step * 1.01).all()
    assert error.max() > 0
    # A power of two makes every product exact, so a dequantized value quantizes to the same code.
    exact = dequantize_nvfp4(data, scales, 2.0**-3)
    again = dequantize_nvfp4(*quantize_nvfp4(exact, 2.0**-3), 2.0**-3)
    full = exact.unflatten(-1, (-1, 16)).abs().amax(-1) == 6 * scales.float() * 2.0**-3
    kept = full.repeat_interleave(16, -1)
    assert full.any()
    assert torch.equal(again[kept], exact[kept])


@pytest.mark.parametrize("o_sf_scale", [0.7, 3.0])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 16), (5, 3, 48), (130, 2, 64)])
def test_output(tokens, heads, dim, o_sf_scale):
    x = normal(tokens, heads, dim).to(torch.bfloat16)
    data, scales = quantize_nvfp4_output(x, o_sf_scale)
    expected_data, expected_scales = reference(x.float().numpy() * np.float32(o_sf_scale))
    assert data.tolist() == expected_data
    columns = -(-heads * dim // 16 // 4) * 4
    assert tuple(scales.shape) == (-(-tokens // 128) * 128, columns)
    assert scales.dtype == torch.float8_e4m3fn
    memory = [0] * scales.numel()
    for m, h, s in itertools.product(range(tokens), range(heads), range(dim // 16)):
        n = (h * dim + 16 * s) // 16
        offset = (m // 128 * (columns // 4) + n // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + n % 4
        memory[offset] = expected_scales[m][h][s]
    assert scales.view(torch.uint8).flatten().tolist() == memory

    linear = torch.tensor(expected_scales, dtype=torch.uint8).view(torch.float8_e4m3fn)
    exact = dequantize_nvfp4(data, linear)
    values = dequantize_nvfp4_output(data, scales, o_sf_scale)
    assert torch.equal(values, exact / o_sf_scale)
    assert torch.equal(dequantize_nvfp4_output(data, scales, torch.tensor([o_sf_scale])), values)


def test_output_start_index():
    """Two outputs are in one scale buffer, the second after the first."""
    x = normal(3, 2, 32)
    data, scales = quantize_nvfp4_output(torch.cat((normal(6, 2, 32, seed=1), x)), 1.5)
    values = dequantize_nvfp4_output(data[6:], scales, 1.5, scale_start_index=6)
    assert torch.equal(values, dequantize_nvfp4_output(*quantize_nvfp4_output(x, 1.5), 1.5))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("v_scale_layout", ["linear", "interleaved"])
def test_kv_cache(kv_layout, v_scale_layout):
    key, value = normal(2, 4, 8, 96), normal(2, 4, 8, 64, seed=1)
    cache = quantize_nvfp4_kv_cache(key, value, kv_layout, v_scale_layout)
    assert cache.kv_layout is KVLayout(kv_layout)
    assert cache.v_scale_layout is VScaleLayout(v_scale_layout)
    assert cache.data == (cache.key, cache.value)
    assert cache.block_scales == (cache.key_scales, cache.value_scales)
    expected = [quantize_nvfp4(x, s) for x, s in ((key, cache.key_global_scale), (value, cache.value_global_scale))]
    v_scales = expected[1].scales
    if v_scale_layout == "interleaved":
        v_scales = interleave_v_scales(v_scales, kv_layout)
        assert not torch.equal(v_scales.view(torch.uint8), expected[1].scales.view(torch.uint8))
    assert cache.key_global_scale == nvfp4_global_scale(key)
    assert cache.value_global_scale == nvfp4_global_scale(value)
    assert torch.equal(cache.key, expected[0].data)
    assert torch.equal(cache.value, expected[1].data)
    assert torch.equal(cache.key_scales.view(torch.uint8), expected[0].scales.view(torch.uint8))
    assert torch.equal(cache.value_scales.view(torch.uint8), v_scales.view(torch.uint8))

    back = dequantize_nvfp4_kv_cache(cache, torch.bfloat16)
    for x, blocks, scale, values in zip(
        (key, value), expected, (cache.key_global_scale, cache.value_global_scale), back, strict=True
    ):
        assert values.shape == x.shape
        assert torch.equal(values, dequantize_nvfp4(*blocks, scale, torch.bfloat16))
    wrong = "linear" if v_scale_layout == "interleaved" else "interleaved"
    confused = dataclasses.replace(cache, v_scale_layout=VScaleLayout(wrong))
    assert not torch.equal(dequantize_nvfp4_kv_cache(confused)[1], back[1].float())


def test_kv_cache_with_given_global_scales():
    key, value = normal(2, 4, 8, 64), normal(2, 4, 8, 64, seed=1)
    k_scale, v_scale = 0.01, torch.tensor([0.02])
    cache = quantize_nvfp4_kv_cache(key, value, KVLayout.HND, VScaleLayout.LINEAR, k_scale, v_scale)
    assert isinstance(cache, NVFP4KVCache)
    assert cache.key_global_scale is k_scale
    assert cache.value_global_scale is v_scale
    assert torch.equal(cache.key, quantize_nvfp4(key, 0.01).data)
    assert torch.equal(cache.value, quantize_nvfp4(value, 0.02).data)


X = torch.ones(4, 2, 32)
DATA, SF = quantize_nvfp4(X, 1.0)
OUT, OUT_SF = quantize_nvfp4_output(X, 1.0)
KV = torch.ones(2, 4, 8, 64)
BAD = {
    "type": (lambda: quantize_nvfp4([1.0], 1.0), TypeError, "x must be a torch.Tensor"),
    "dtype": (lambda: quantize_nvfp4(X.double(), 1.0), TypeError, "x must have dtype .*float64"),
    "blocks": (
        lambda: quantize_nvfp4(X[..., :24], 1.0),
        ValueError,
        r"x's last dimension must be a multiple of 16.*24\)",
    ),
    "scalar": (lambda: quantize_nvfp4(X[0, 0, 0], 1.0), ValueError, r"got shape \(\)"),
    "scale": (lambda: quantize_nvfp4(X, 0.0), ValueError, "global_scale must be positive and finite, got 0.0"),
    "scale shape": (lambda: quantize_nvfp4(X, torch.ones(2)), ValueError, "global_scale must have one element"),
    "data dtype": (lambda: dequantize_nvfp4(X, SF), TypeError, "data must have dtype torch.uint8"),
    "scales dtype": (lambda: dequantize_nvfp4(DATA, SF.view(torch.uint8)), TypeError, "scales must have dtype"),
    "scales shape": (
        lambda: dequantize_nvfp4(DATA, SF[..., :1]),
        ValueError,
        r"scales must have data's shape.*\(4, 2, 1\)",
    ),
    "data width": (lambda: dequantize_nvfp4(DATA[..., :12], SF[..., :1]), ValueError, "data's last dimension must be"),
    "to": (lambda: dequantize_nvfp4(DATA, SF, 1.0, torch.float64), TypeError, "dtype must be .*float64"),
    "output rank": (lambda: quantize_nvfp4_output(X[0], 1.0), ValueError, "x must be 3-D"),
    "output blocks": (lambda: quantize_nvfp4_output(X[..., :8], 1.0), ValueError, "x's last dimension"),
    "output scale": (lambda: quantize_nvfp4_output(X, -1.0), ValueError, "o_sf_scale must be positive"),
    "output to": (lambda: dequantize_nvfp4_output(OUT, OUT_SF, 1.0, 0, torch.int8), TypeError, "dtype must be"),
    "output back rank": (lambda: dequantize_nvfp4_output(OUT[0], OUT_SF, 1.0), ValueError, "data must be 3-D"),
    "output width": (lambda: dequantize_nvfp4_output(OUT[..., :4], OUT_SF, 1.0), ValueError, "multiple of 8, got 4"),
    "output start": (lambda: dequantize_nvfp4_output(OUT, OUT_SF, 1.0, 125), ValueError, r"rows 125\.\.129"),
    "output back scale": (lambda: dequantize_nvfp4_output(OUT, OUT_SF, 0.0), ValueError, "o_sf_scale must be positive"),
    "kv layout": (lambda: quantize_nvfp4_kv_cache(KV, KV, "ND", "linear"), ValueError, "kv_layout must be one of"),
    "kv v layout": (
        lambda: quantize_nvfp4_kv_cache(KV, KV, "HND", "swizzled"),
        ValueError,
        "v_scale_layout must be one of 'linear', 'interleaved', got 'swizzled'",
    ),
    "kv rank": (lambda: quantize_nvfp4_kv_cache(KV, KV[0], "HND", "linear"), ValueError, "value must be 4-D"),
    "kv pages": (
        lambda: quantize_nvfp4_kv_cache(KV, KV[:1], "HND", "linear"),
        ValueError,
        "key and value must have the same",
    ),
    "kv dtype": (lambda: quantize_nvfp4_kv_cache(KV.int(), KV, "HND", "linear"), TypeError, "key must have dtype"),
    "kv head dim": (
        lambda: quantize_nvfp4_kv_cache(KV, KV[..., :24], "HND", "linear"),
        ValueError,
        "value's last dimension",
    ),
    "kv scale": (lambda: quantize_nvfp4_kv_cache(KV, KV, "HND", "linear", 1.0, -1.0), ValueError, "value_global_scale"),
    "kv interleave": (
        lambda: quantize_nvfp4_kv_cache(KV[..., :32], KV[..., :32], "HND", "interleaved"),
        ValueError,
        "head_dim / 16. must be a multiple of 4, got 2",
    ),
    "kv page size": (
        lambda: quantize_nvfp4_kv_cache(KV[:, :, :2], KV[:, :, :2], "HND", "interleaved"),
        ValueError,
        "page_size must be a multiple of 4, got 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
