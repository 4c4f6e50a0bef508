"""Prefill on sm_120: the parts of Hopper's kernels over products of single warps, in the emulator.

On a Hopper GPU, ``HOPWELL_KERNELS=sm_120a python -m pytest -m gpu tests/prefill`` runs them on silicon.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import round_keys_and_values, with_fp8_cache
from helpers.batches.low_precision import BF16, LowPrecisionBatch, at_tile_edges
from helpers.batches.prefill import CAUSAL, Batch, window
from helpers.calls.entries import context
from helpers.cases.prefill import SM120_CASES
from helpers.oracles.skipped_tiles import attention_with_skips, check_left_out

from hopwell.kernels import execute
from hopwell.kernels.jit import toolchain
from hopwell.kernels.problem import Mask, PageTable, Score
from hopwell.kernels.registry import resolve
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig
from tests.prefill import test_cudnn_entry as cudnn_entry
from tests.prefill.quantized import test_fp8_mma as e4m3
from tests.prefill.quantized import test_nvfp4_cache as nvfp4


def batch(dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Batch:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries."""
    lengths = dict(q_lens=[130, 0, 5, 7], kv_lens=[265, 3, 0, 4], heads=4, kv_heads=2) | changes
    return Batch(head_dim=dims[0], v_head_dim=dims[1], device="cpu", dtype=dtype, **lengths)


def check(data: Batch, page_size: int | None, mask: Mask, **options: Any) -> None:
    from hopwell import emulator

    with emulator.use("sm_120a", race=True, proxy=True, strict=True, schedule="random", seed=3):
        problem = data.problem(page_size, mask, lse=data.ragged_lse(), **options)
        out = execute(problem)
    expected = data.expected(mask, score=options.get("score", Score()))
    expected.check(out)
    assert problem.lse is not None
    expected.check_lse(problem.lse.tensor)


@pytest.mark.emulator
@pytest.mark.parametrize("case", SM120_CASES, ids=str)
def test_attention(case: tuple) -> None:
    dims, page_size, mask, options = case
    check(batch(dims), page_size, mask, **options)


@pytest.mark.emulator
@pytest.mark.parametrize(("page_size", "mask", "heads"), [(16, CAUSAL, 1), (4, window(70), 4)], ids=str)
def test_warps_share_the_rows_of_the_widest_heads(page_size: int, mask: Mask, heads: int) -> None:
    """Two warps share each row by halves, in tiles of 32 rows: of one head, and of several packed heads."""
    dtype, q_len = (torch.bfloat16, 70) if heads == 1 else (torch.float16, 9)
    # The third request takes only one step: only the warps' meeting keeps one's output from another's Q.
    lengths = dict(q_lens=[q_len, 0, 5, 3], kv_lens=[105, 3, 20, 0], heads=heads, kv_heads=1)
    check(batch((512, 512), dtype, **lengths), page_size, mask)


@pytest.mark.emulator
def test_the_widest_heads_leave_tiles_out_by_32_rows() -> None:
    from hopwell import emulator

    data = Batch([64], [500], 1, 1, 512, magnitude=1.5, device="cpu")
    with emulator.use("sm_120a"):
        check_left_out(data, 50.0, None, CAUSAL, Score())


@pytest.mark.emulator
def test_warps_that_dequantize_leave_tiles_out() -> None:
    """Keys and values are e4m3, which each warp dequantizes for itself; two thirds of the keys weigh little."""
    from hopwell import emulator

    data = Batch([64], [400], 2, 1, 160, magnitude=1.5, device="cpu")
    data.k[0][torch.arange(400) % 300 >= 100] *= 0.02
    round_keys_and_values(data)
    count = torch.zeros(1, dtype=torch.int32)
    problem = with_fp8_cache(data.problem(16, CAUSAL, skip_softmax=50.0, skipped_tiles=count))
    with emulator.use("sm_120a", race=True, proxy=True, strict=True):
        out = execute(problem)
        want, skipped = attention_with_skips(data, 50.0, CAUSAL, Score())
    assert int(count) == skipped > 0
    assert (out.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.emulator
def test_heads_share_tiles_of_few_queries() -> None:
    data = batch((128, 128), torch.float16, q_lens=[3, 1, 2], kv_lens=[130, 50, 3], heads=8, kv_heads=1)
    config = resolve(data.problem(16), "sm_120a")
    assert config.packs_heads  # type: ignore[attr-defined]
    check(data, 16, CAUSAL)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_121a"])
def test_other_devices_give_the_same_bits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper runs the kernels of sm_120 on request, and sm_121 runs exactly the same kernels."""
    from hopwell import emulator

    data = batch((64, 64), q_lens=[5, 70], kv_lens=[77, 70])
    problem = data.problem(16)
    with emulator.use("sm_120a"):
        out = execute(problem).clone()
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    with emulator.use(arch):
        assert torch.equal(execute(problem), out)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("property_holds", "arguments"),
    [
        (e4m3.test_tails_keep_their_weight, dict(dims=(64, 64), place=(2, 44))),
        (e4m3.test_output_saturates, {}),
        (e4m3.test_places_of_pages_and_requests_change_no_bit, {}),
        (e4m3.test_skip_softmax_leaves_tiles_out, {}),
        (nvfp4.test_nvfp4_output, dict(dims=(64, 64), few=False)),
        (cudnn_entry.test_padding_of_the_log_sum_exp, dict(lens_dtype=torch.int32)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_properties_of_other_tests(property_holds: Any, arguments: dict[str, Any]) -> None:
    """Properties of 8- and 4-bit operands, and of padding, from other tests hold for these kernels too."""
    from hopwell import emulator

    with emulator.use("sm_120a"):
        property_holds(device="cpu", **arguments)


@pytest.mark.emulator
@pytest.mark.parametrize("case", [SM120_CASES[1], SM120_CASES[2]], ids=str)
def test_every_visible_key_counts_once(case: tuple) -> None:
    """With equal keys and one-hot values, a row's output counts its visible keys.

    One key too many or too few changes the output far more than rounding.
    """
    from hopwell import emulator

    dims, page_size, mask, _ = case
    data = batch(dims)
    for k, v in zip(data.k, data.v, strict=True):
        k.fill_(0.5)
        v.zero_()
        index = torch.arange(len(v))
        v[index, :, index % dims[1]] = 1.0
    with emulator.use("sm_120a"):
        out = execute(data.problem(page_size, mask)).double()
    exact = data.expected(mask).out
    assert ((out - exact).abs() <= 2**-8 * exact).all()


@pytest.mark.emulator
def test_places_of_pages_and_requests_change_no_bit() -> None:
    """Operands have 16 bits; heads are packed, in the batch and alone."""
    from hopwell import emulator

    data = batch((64, 64), q_lens=[30, 9], kv_lens=[165, 70])
    problem = data.problem(4)
    key, value, table = data.pages(4, order=5)
    moved = replace(problem, key=key, value=value, page_table=PageTable(table, table), out=data.output())
    with emulator.use("sm_120a", schedule="random", seed=3):
        out = execute(problem)
        assert torch.equal(execute(moved), out)
        alone = [execute(data.request(index).problem(4)) for index in range(data.size)]
    assert torch.equal(torch.cat(alone), out)


@pytest.mark.emulator
def test_keys_far_below_at_the_edges_of_tiles() -> None:
    """Rows that see no other key give such keys all of their weight; other rows give none."""
    from hopwell import emulator

    data = at_tile_edges(LowPrecisionBatch([70], [70], heads=2, kv_heads=1, head_dim=64, device="cpu"), 64)
    key, value, table = data.pages(16)
    with emulator.use("sm_120a"):
        options = dict(bmm1_scale=data.bmm1_scale, bmm2_scale=data.bmm2_scale, out_dtype=BF16)
        data.expected_low(CAUSAL).check(context(data, (key, value), table, **options))


@pytest.mark.emulator
def test_scaled_products_are_those_of_plain_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block-scaled instruction, with scales of 1, multiplies 8-bit operands.

    Only a kernel compiled for another architecture has the plain instruction.
    """
    from hopwell import emulator

    data = e4m3.batch((64, 64), "cpu", q_lens=[70], kv_lens=[130])
    problem = data.in_fp8(16, CAUSAL, BF16)
    config = resolve(problem, "sm_120a")
    outs, ptx = [], []
    for folder, scales in (("scaled", True), ("plain", False)):
        monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / folder))
        monkeypatch.setattr(toolchain, "_functions", {})
        if not scales:
            monkeypatch.setattr(Sm120PrefillConfig, "block_scaled", False)
        with emulator.use("sm_120a"):
            outs.append(execute(problem).clone())
        ptx.append(toolchain.artifact(config).ptx.read_text())
    assert ["mxf8f6f4" in text for text in ptx] == [True, False]
    assert torch.equal(*outs)


@pytest.mark.emulator
def test_plain_products_run_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper computes them by way of 16 bits, and adds products in another order."""
    from hopwell import emulator

    data = e4m3.batch((64, 64), "cpu", q_lens=[70], kv_lens=[130])
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    with emulator.use("sm_90a"):
        data.check_fp8(execute(data.in_fp8(16, CAUSAL, BF16)), CAUSAL)
