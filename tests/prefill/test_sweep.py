"""Every prefill kernel against float64, at every page size, with lengths around tile and page boundaries."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, window
from helpers.cases.prefill_configs import MAIN_DIMS

from hopwell.kernels import execute
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import Mask
from hopwell.kernels.registry import resolve

pytestmark = pytest.mark.gpu

DIMS = MAIN_DIMS  # the others are in test_features.py
DTYPES = (torch.bfloat16, torch.float16)
MASKS = (FULL, CAUSAL, window(0), window(1), window(127), window(600), window(100_000))
PAGE_SIZES = (None, *(1 << i for i in range(11)))


def name(value: object) -> str | None:
    if isinstance(value, Mask):
        return value.kind.value + (str(value.window_left) if value.window_left >= 0 else "")
    if isinstance(value, tuple):
        return f"d{value[0]}" if value[0] == value[1] else f"d{value[0]}_{value[1]}"
    if isinstance(value, torch.dtype):
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[value]
    return "ragged" if value is None else None


def adversarial(dims: tuple[int, int], page: int, packed: bool = False) -> tuple[list[int], list[int]]:
    """Return query and KV lengths around the kernels' tile sizes, with empty requests and more queries than keys.

    Lengths are mostly short for packed heads.
    """
    tile = PrefillConfig.tile_of(dims, packs_heads=packed)
    m, n = tile.m, tile.n
    pairs = [
        (1, 1),
        (0, 5),
        (3, max(page - 1, 1)),
        (5, page),
        (m - 1, page + 1),
        (m, n - 1),
        (m + 1, n),
        (2, n + 1),
        (7, 0),
        (9, 4),
        (0, 0),
        (m + 1, 3 * n + 5),
        (2 * m + 1, 2 * m + 1),
        (1, 2 * n),
        (1 if packed else 3 * m, 7 * n + 5),
    ]
    return [q for q, _ in pairs], [kv for _, kv in pairs]


@pytest.mark.parametrize("page_size", PAGE_SIZES, ids=name)
@pytest.mark.parametrize("mask", MASKS, ids=name)
@pytest.mark.parametrize("dims", DIMS, ids=name)
@pytest.mark.parametrize(("dtype", "packed"), [(DTYPES[0], False), (DTYPES[0], True), (DTYPES[1], False)], ids=name)
def test_kernel(dtype: torch.dtype, packed: bool, dims: tuple[int, int], mask: Mask, page_size: int | None) -> None:
    lengths = adversarial(dims, page_size or 16, packed)
    batch = Batch(*lengths, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    problem = batch.problem(page_size, mask, lse=batch.ragged_lse())
    assert resolve(problem, "sm_90a").packs_heads == packed
    out = execute(problem)
    expected = batch.expected(mask)
    expected.check(out)
    expected.check_lse(problem.lse.tensor)


@pytest.mark.parametrize("page_size", [None, 4, 16, 64], ids=name)
@pytest.mark.parametrize("mask", MASKS, ids=name)
@pytest.mark.parametrize("dims", DIMS, ids=name)
@pytest.mark.parametrize("packed", [False, True])
def test_mask_is_exact(packed: bool, dims: tuple[int, int], mask: Mask, page_size: int | None) -> None:
    """With equal keys, every visible key has the same weight; with one-hot values, the output counts visible keys.

    One key too many or too few changes an element far more than rounding, which random values would hide.
    """
    batch = Batch(*adversarial(dims, page_size or 16, packed), head_dim=dims[0], v_head_dim=dims[1])
    for k, v in zip(batch.k, batch.v, strict=True):
        k.fill_(0.5)
        v.zero_()
        index = torch.arange(v.shape[0], device=v.device)
        v[index, :, index % dims[1]] = 1.0
    problem = batch.problem(page_size, mask)
    assert resolve(problem, "sm_90a").packs_heads == packed
    out = execute(problem).double()
    exact = batch.expected(mask).out
    assert ((out - exact).abs() <= 2**-8 * exact).all()


@pytest.mark.parametrize("page_size", [None, 2, 32], ids=name)
@pytest.mark.parametrize("dims", DIMS, ids=name)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
def test_heads_that_share_keys(group: int, dims: tuple[int, int], page_size: int | None) -> None:
    batch = Batch([37, 130], [90, 300], 3 * group, 3, *dims)
    batch.expected().check(execute(batch.problem(page_size)))


@pytest.mark.parametrize("page_size", [None, 16], ids=name)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(127)], ids=name)
@pytest.mark.parametrize("dims", DIMS, ids=name)
@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 8.0, 60.0])
def test_magnitudes(magnitude: float, dims: tuple[int, int], mask: Mask, page_size: int | None) -> None:
    """Attention ranges from uniform to logits of tens of thousands, with one dominant key per row."""
    batch = Batch([129, 200], [513, 200], head_dim=dims[0], v_head_dim=dims[1], magnitude=magnitude)
    problem = batch.problem(page_size, mask, lse=batch.ragged_lse())
    out = execute(problem)
    expected = batch.expected(mask)
    expected.check_lse(problem.lse.tensor)
    if magnitude > 8:
        # Two keys within float32 rounding of each other: their shares are no longer determined.
        close = (out.double() - expected.out).abs().amax(2) < 0.05
        assert close.double().mean() > 0.99
    else:
        expected.check(out)


@pytest.mark.parametrize("dims", DIMS, ids=name)
def test_rising_logits(dims: tuple[int, int]) -> None:
    """The largest logit moves in every step and from side to side, so that every rescale happens."""
    batch = Batch([200], [1000], head_dim=dims[0], v_head_dim=dims[1])
    batch.q.zero_()
    batch.q[..., 0] = 1.0
    batch.k[0].zero_()
    ramp = torch.linspace(-40, 40, 1000, device="cuda")
    batch.k[0][:, 0, 0] = ramp.to(batch.dtype)
    batch.k[0][:, 1, 0] = (40 * torch.cos(ramp)).to(batch.dtype)
    for mask in (FULL, CAUSAL, window(300)):
        batch.expected(mask, scale=2.0).check(execute(batch.problem(64, mask, softmax_scale=2.0)))


def test_output_of_another_dtype() -> None:
    for dtype, out_dtype in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        batch = Batch([37, 130], [90, 300], dtype=dtype)
        out = batch.output().to(out_dtype)
        execute(batch.problem(16, out=out))
        batch.expected(out_dtype=out_dtype).check(out)


def test_scale_of_zero_is_uniform_attention() -> None:
    batch = Batch([37, 130, 9], [90, 300, 4])
    batch.expected(scale=0.0).check(execute(batch.problem(16, softmax_scale=0.0)))
