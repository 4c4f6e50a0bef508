"""Prefill with scales of each KV head of a cache, against float64 and against calls with one scale for all heads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import largest_logit_error
from helpers.batches.low_precision import (
    BF16,
    E4M3,
    FP16,
    NVFP4,
    LowPrecisionBatch,
    check_nvfp4_output,
)
from helpers.batches.prefill import CAUSAL, window
from helpers.calls.entries import context, cudnn

from hopwell.kernels.problem import Mask

KV_HEADS = 3
# Softmax from nearly uniform to one key alone, and outputs of both signs and of very different sizes.
K_SCALES, V_SCALES = (0.01, 1.0, 100.0), (-100.0, 1.0, 0.01)
MANY, FEW = dict(q_lens=[70, 0, 5, 7], kv_lens=[205, 3, 0, 4]), dict(q_lens=[3, 1, 2], kv_lens=[130, 50, 3])


def batch(device: str, dims: tuple[int, int] = (128, 128), **changes: Any) -> LowPrecisionBatch:
    """Return a batch of two query heads for each KV head."""
    sizes = dict(heads=2 * KV_HEADS, kv_heads=KV_HEADS, head_dim=dims[0], v_head_dim=dims[1])
    return LowPrecisionBatch(device=device, **sizes | MANY | changes)


def of_head(data: LowPrecisionBatch, head: int, **scales: float) -> LowPrecisionBatch:
    """Return the batch of one KV head."""
    one = replace(data, heads=data.heads // data.kv_heads, kv_heads=1, **scales)
    one.q = data.q.unflatten(1, (data.kv_heads, -1))[:, head]
    one.k, one.v = ([x[:, head : head + 1] for x in part] for part in (data.k, data.v))
    return one


def heads_of(out: torch.Tensor) -> torch.Tensor:
    return out.unflatten(1, (KV_HEADS, -1)).transpose(0, 1)


def on(device: str, *scales: tuple[float, ...]) -> list[torch.Tensor]:
    return [torch.tensor(one, device=device) for one in scales]


def run(data: LowPrecisionBatch, bmm1_scale: Any, bmm2_scale: Any, **options: Any) -> Any:
    key, value, table = data.pages(16)
    if data.kv_dtype is NVFP4:
        options |= dict(kv_block_scales=data.block_scales(16, "interleaved"))
    return context(data, (key, value), table, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, **options)


def check(data: LowPrecisionBatch, out: torch.Tensor, mask: Mask, k: Any = K_SCALES, v: Any = V_SCALES) -> None:
    """Check each KV head by itself, because its output may be far smaller than other heads' errors."""
    for head, found in enumerate(heads_of(out)):
        of_head(data, head, k_scale=k[head], v_scale=v[head]).expected_low(mask).check(found)


CASES = [
    ("sm_90a", (128, 128), BF16, E4M3, MANY),
    ("sm_90a", (128, 128), BF16, E4M3, FEW),
    ("sm_90a", (256, 256), BF16, E4M3, MANY),
    ("sm_90a", (64, 64), FP16, NVFP4, MANY),
    ("sm_90a", (128, 128), E4M3, E4M3, MANY),
    ("sm_90a", (192, 128), E4M3, E4M3, FEW),
    ("sm_120a", (128, 128), BF16, E4M3, FEW),
    ("sm_120a", (64, 64), E4M3, E4M3, MANY),
    ("sm_120a", (512, 512), FP16, E4M3, FEW),
    ("sm_100a", (128, 128), FP16, NVFP4, MANY),
    ("sm_100a", (128, 128), E4M3, E4M3, MANY),
]


def float64(case: tuple, device: str) -> None:
    _, dims, q_dtype, kv_dtype, lengths = case
    data = batch(device, dims, q_dtype=q_dtype, kv_dtype=kv_dtype, dtype=FP16 if q_dtype is FP16 else BF16, **lengths)
    k_scales, v_scales = on(device, K_SCALES, V_SCALES)
    options = dict(out_dtype=BF16) if q_dtype is E4M3 else {}
    out = run(data, k_scales * data.scale, v_scales, window_left=100, **options)
    check(data, out, window(100))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "sm_90a"], ids=str)
def test_float64(case: tuple) -> None:
    float64(case, "cuda")


@pytest.mark.emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_emulated(case: tuple) -> None:
    from hopwell import emulator

    with emulator.use(case[0], race=True, proxy=True, strict=True, schedule="random", seed=3):
        float64(case, "cpu")


@pytest.mark.parametrize("q_dtype", [BF16, E4M3], ids=["fp8_kv", "fp8"])
def test_bits_are_those_of_one_scale(q_dtype: torch.dtype, device: str) -> None:
    """Each KV head has the bits, sinks and log-sum-exp of a call with its scales for all heads. NaN and negative scales
    give NaN in their own heads only."""
    data = batch(device, (64, 64), q_dtype=q_dtype, **FEW)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device)
    options: dict[str, Any] = dict(out_dtype=BF16, sinks=sinks, return_lse=True)
    k_scales, v_scales = on(device, K_SCALES, V_SCALES)
    for given in ((k_scales * data.scale, v_scales), (k_scales * data.scale, 2.0), (data.scale, v_scales)):
        found = [heads_of(part) for part in run(data, *given, **options)]
        for head in range(KV_HEADS):
            one = (scale[head].item() if isinstance(scale, torch.Tensor) else scale for scale in given)
            for part, want in zip(found, run(data, *one, **options), strict=True):
                assert torch.equal(part[head], heads_of(want)[head])
    plain = heads_of(run(data, data.scale, 1.0, **options)[0])
    for wrong in (math.nan, -1.0):
        (k_scales,) = on(device, (data.scale, wrong, data.scale))
        out = heads_of(run(data, k_scales, v_scales.abs() ** 0, **options)[0])
        assert out[1].isnan().all()
        assert torch.equal(out[::2], plain[::2])


def test_skip_softmax(device: str) -> None:
    """Heads leave out different tiles, because their scales differ."""
    data = batch(device, (64, 64), q_dtype=BF16, q_lens=[64], kv_lens=[640], magnitude=2.0)
    light = (torch.arange(640, device=device) % 300 < 200)[:, None, None]
    data.store([torch.where(light, k / 64, k) for k in data.k], data.v)
    options, nothing = (dict(skip_softmax_threshold_scale_factor=factor) for factor in (100.0, 1e-30))
    (k_scales,) = on(device, (0.01, 1.0, 2.0))
    found, exact = (heads_of(run(data, k_scales * data.scale, 1.0, **each)) for each in (options, nothing))
    for head, scale in enumerate(k_scales.tolist()):
        assert torch.equal(found[head], heads_of(run(data, scale * data.scale, 1.0, **options))[head])
    assert torch.equal(found[0], exact[0])
    assert not torch.equal(found[2], exact[2])


@pytest.mark.parametrize("out_dtype", [E4M3, "nvfp4"], ids=str)
def test_narrow_outputs(out_dtype: Any, device: str) -> None:
    data = batch(device, (64, 64), q_dtype=E4M3, **FEW)
    k_scales, v_scales = on(device, K_SCALES, (-1.0, 1.0, 0.1))
    given = (k_scales * data.scale, v_scales)
    half = run(data, *given, out_dtype=FP16)
    if out_dtype is E4M3:
        found = run(data, *given, out_dtype=E4M3).float()
        assert (found - half).norm() < 0.05 * half.norm()
    else:
        check_nvfp4_output(run(data, *given, out_dtype="nvfp4", o_sf_scale=3.0), half, 3.0)


def test_cudnn_entry(device: str) -> None:
    """Each of the three scales may have a value for each KV head; the log-sum-exp includes them."""
    data = batch(device, (64, 64), **FEW)
    q_scales, k_scales, v_scales = on(device, (2.0, 1.0, 0.5), K_SCALES, V_SCALES)
    key, value, table = data.pages(16)
    product = tuple((q_scales * k_scales).tolist())
    for given in (
        dict(q_scale=q_scales, k_scale=k_scales),
        dict(q_scale=on(device, (1.0,))[0].view(1, 1, 1, 1), k_scale=q_scales * k_scales),
    ):
        out, lse = cudnn(data, key, value, block_tables=table, o_data_type=BF16, v_scale=v_scales, **given)
        check(data, out, CAUSAL, product)
    for head, scale in enumerate(product):
        one = of_head(data, head, k_scale=scale)
        want = one.expected_low(CAUSAL).lse
        found = torch.cat([lse[i, :n, 2 * head : 2 * head + 2] for i, n in enumerate(data.q_lens)])
        # Sums of 8-bit products have 13 to 14 bits of their largest summand, whatever is left of it in the result.
        error = max(largest_logit_error(q, k, one.bmm1_scale) for q, k, *_ in one.requests(CAUSAL))
        assert ((found.double() - want).abs() <= error + 1e-5 * (1 + want.abs())).all()


def test_a_batch_of_equal_requests(device: str) -> None:
    """Requests have the bits that they have alone."""
    alone = batch(device, (64, 64), q_dtype=BF16, q_lens=[5], kv_lens=[77])
    many = replace(alone, q_lens=[5] * 3, kv_lens=[77] * 3)
    many.q = alone.q.repeat(3, 1, 1)
    many.store(alone.k * 3, alone.v * 3)
    k_scales, v_scales = on(device, K_SCALES, V_SCALES)
    one, out = (run(data, k_scales * data.scale, v_scales) for data in (alone, many))
    assert torch.equal(out, one.repeat(3, 1, 1))


@pytest.mark.emulator
def test_a_graph_has_them_as_tensors() -> None:
    data = batch("cpu", (64, 64), **FEW)
    k_scales, v_scales = on("cpu", K_SCALES, V_SCALES)

    def call(bmm1_scale: torch.Tensor, bmm2_scale: torch.Tensor) -> torch.Tensor:
        return run(data, bmm1_scale, bmm2_scale, out_dtype=BF16)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=False)
    for one in (k_scales * data.scale, k_scales.flip(0) * data.scale):
        assert torch.equal(compiled(one, v_scales), call(one, v_scales))
