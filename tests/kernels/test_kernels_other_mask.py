"""A mask that this project does not have: a rule with its bounds is all that a kernel needs."""

from __future__ import annotations

import pathlib
from typing import Any

import cutlass
import pytest
import torch
from helpers import reference
from helpers.batches import Batch

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.families import resolve
from hopwell.kernels.masks import Mask, MaskKinds, MaskRule


def _end(position: Any, size: Any) -> Any:
    return cutlass.max(position + 1, size)


class OtherKind(MaskKinds):
    # Keys 0..p, and the first ``window_left`` for every row, as a prefix that sees itself as a whole.
    PREFIX = MaskRule("prefix", "prefix", "causal mask with a prefix", end=_end, size="window_left")


PREFIX = 70


def visible(q_len: int, kv_len: int, mask: Mask, device: torch.device) -> torch.Tensor:
    """Return [q_len, kv_len], true where a row sees a key."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None]
    return (key <= position) | (key < mask.window_left)


@pytest.mark.emulator
def test_a_mask_is_its_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    # The name of a kernel in the cache does not say what the rule of a test was.
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(reference, "visible", visible)
    mask = Mask(OtherKind.PREFIX, PREFIX)
    data = Batch([3, 9, 70], [3, 200, 20], heads=1, kv_heads=1, head_dim=64, device="cpu")
    problem = data.problem(None, mask)
    assert resolve(problem, "sm_90a").name == "prefill_sm_90a_bf16_d64_prefix_contiguous"
    with emulator.use("sm_90a", race=True, strict=True):
        out = execute(problem)
    data.expected(mask).check(out)
