"""Messages are short, quick to make, and say what else is allowed; sizes of workspaces are checked."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.api_calls import CONTEXT, FMHA, XQA, refused

from hopwell.decode import xqa_workspace_bytes
from hopwell.mla import mla_workspace_bytes


@pytest.mark.parametrize("entry", [CONTEXT, XQA])
def test_no_object_is_formatted_as_a_whole(entry: str) -> None:
    for large in (torch.empty(1 << 22, dtype=torch.uint8).untyped_storage(), [0] * 10**7, "x" * 10**8):
        start = time.perf_counter()
        refused(entry, TypeError, "^workspace_buffer must be a torch.Tensor, got .{,99}$", workspace_buffer=large)
        assert time.perf_counter() - start < 1


def test_what_else_is_allowed_is_named() -> None:
    refused(CONTEXT, TypeError, "^bmm1_scale must be a float or a float32 tensor of one element", bmm1_scale="1")
    refused(CONTEXT, TypeError, "^sinks must be a torch.Tensor, a list of one, or None", sinks=3)
    refused(CONTEXT, TypeError, "^enable_pdl must be True, False or None", enable_pdl=1)
    refused(FMHA, TypeError, "^logits_soft_cap_scale must be a float or None", logits_soft_cap_scale="1")


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim", "max_seq_len", "q_len_per_req"])
def test_sizes_of_workspaces_are_checked(name: str) -> None:
    sizes = dict(num_heads=8, num_kv_heads=2, head_dim=128, max_seq_len=1024, q_len_per_req=1)
    assert xqa_workspace_bytes(**sizes, device="cpu") > 0
    for bad, error in ((-1, ValueError), ("8", TypeError), (2.0, TypeError), (1 << 40, ValueError)):
        with pytest.raises(error, match=f"^{name} must"):
            xqa_workspace_bytes(**{**sizes, name: bad}, device="cpu")
        if name in ("num_heads", "max_seq_len", "q_len_per_req"):
            latent = {k: sizes[k] for k in ("num_heads", "max_seq_len", "q_len_per_req")}
            with pytest.raises(error, match=f"^{name} must"):
                mla_workspace_bytes(**{**latent, name: bad}, device="cpu")
