"""compute-sanitizer checks the kernels that its filter names."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers.device.sanitizer import check_sanitized

import hopwell

pytestmark = pytest.mark.gpu

PAGE_SIZE = 4  # too small for TMA, whose reads beyond a tensor give zeros


def decode_beyond_the_pool(device: str) -> None:
    """Decode one request whose page lies 1 GiB behind a pool of one page."""
    page = torch.zeros(1, PAGE_SIZE, 1, 128, dtype=torch.bfloat16, device=device)
    hopwell.xqa_batch_decode_with_kv_cache(
        page[0, :1],
        (page, page),
        torch.empty(0, dtype=torch.uint8, device=device),
        torch.tensor([[1 << 20]], dtype=torch.int32, device=device),
        torch.tensor([PAGE_SIZE], dtype=torch.int32, device=device),
        PAGE_SIZE,
        bmm1_scale=1.0,
    )


def test_sanitizer_finds_a_read_beyond_the_pool() -> None:
    with pytest.raises(AssertionError, match="Invalid __global__ read"):
        check_sanitized("memcheck", __file__, "cuda")


if __name__ == "__main__":
    decode_beyond_the_pool(sys.argv[1])
    torch.cuda.synchronize()
