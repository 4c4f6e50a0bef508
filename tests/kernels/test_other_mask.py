"""Masks from outside this project, added as docs/architecture.md describes.

A mask that is an interval of keys takes a rule. A mask with holes takes a rule and a class with its predicate.
"""

from __future__ import annotations

import pathlib
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.oracles import reference

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.masks import Mask, MaskEnum, MaskRule
from hopwell.kernels.parts.rows import mask as mask_part
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.registry import resolve


def _end(position: Any, size: Any) -> Any:
    return cutlass.max(position + 1, size)


def _to_itself(position: Any, size: Any) -> Any:
    return position + 1


class OtherKind(MaskEnum):
    # Keys 0..p, and the first ``window_left`` for every row: a prefix that sees itself completely.
    PREFIX = MaskRule("prefix", "prefix", "causal mask with a prefix", end=_end, size="window_left")
    # Every ``window_left``-th key before p, and p.
    DILATED = MaskRule("dilated", "dilated", "dilated causal mask", end=_to_itself, size="window_left")


PREFIX = 70
STRIDE = 4


class DilatedMask(IntervalMask):
    """Keys whose distance from the row is a multiple of ``size``, which is a power of two."""

    is_interval = False

    @cute.jit
    def apply(self, scores, tile_start, row):
        for r in cutlass.range_constexpr(scores.rows):
            origin = row.positions[r] - (tile_start + scores.first_column())
            for c in cutlass.range_constexpr(scores.columns):
                distance = origin - scores.column_offset(c)
                visible = distance >= 0 and distance & (self.size - 1) == 0
                scores.set(r, c, scores.get(r, c) if visible else -cutlass.Float32.inf)


def seen_by_dilated(q_len: int, kv_len: int, mask: Mask, device: torch.device) -> torch.Tensor:
    distance = torch.arange(q_len, device=device)[:, None] + kv_len - q_len - torch.arange(kv_len, device=device)[None]
    return (distance >= 0) & (distance % mask.window_left == 0)


def visible(q_len: int, kv_len: int, mask: Mask, device: torch.device) -> torch.Tensor:
    """Return [q_len, kv_len], true where a row sees a key."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None]
    return (key <= position) | (key < mask.window_left)


@pytest.mark.emulator
def test_a_mask_is_its_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    # A kernel's name in the cache does not contain the rule of a test.
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(reference, "visible", visible)
    mask = Mask(OtherKind.PREFIX, PREFIX)
    data = Batch([3, 9, 70], [3, 200, 20], heads=1, kv_heads=1, head_dim=64, device="cpu")
    problem = data.problem(None, mask)
    assert resolve(problem, "sm_90a").name == "prefill_sm_90a_bf16_d64_prefix_contiguous"
    with emulator.use("sm_90a", race=True, strict=True):
        out = execute(problem)
    data.expected(mask).check(out)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_a_mask_with_holes_is_a_rule_and_a_predicate(
    arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HOPWELL_EMULATE", arch)
    monkeypatch.setattr(reference, "visible", seen_by_dilated)
    monkeypatch.setitem(mask_part.MASK_TYPES, OtherKind.DILATED, DilatedMask)
    mask = Mask(OtherKind.DILATED, STRIDE)
    data = Batch([3, 9, 150], [3, 400, 450], heads=1, kv_heads=1, head_dim=64, device="cpu")
    data.expected(mask).check(execute(data.problem(None, mask)))
