"""One small case of every shipped MLA kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import sys

import pytest
from helpers.cases.decode import cut_tokens
from helpers.cases.mla import Case, check_case, heads_of
from helpers.covering.shipped import all_shipped
from helpers.device.sanitizer import TOOLS, check_sanitized

from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, ROWS
from hopwell.kernels.problem import Family

pytestmark = pytest.mark.gpu

SHIPPED = all_shipped("sm_90a", Family.MLA)


def small_case(config: MlaConfig) -> None:
    """Check requests from zero keys to three chunks, which are combined.

    Dense attention fills two tiles of the largest size. Sparse attention has top-k indices for up to three chunks.
    """
    chunk, dims = cut_tokens(config), (config.head_dim_qk, config.head_dim_v)
    page_size, heads = config.box_rows or 4, 24 if config.rows == ROWS and not config.sparse else heads_of(config, 3)
    for top_k in (64, 2 * chunk + 68) if config.sparse else (0,):
        # A kernel with CTA parts serves only nearly even numbers of new tokens.
        q_lens = [3, 0, 3, 1, 2] if config.batch_invariant or config.rows != ROWS else [3, 0, 3, 3, 3]
        sizes = q_lens, [1, 9, chunk + 5, 0, 2 * chunk + 70]
        case = Case(
            *sizes, heads=heads, dims=dims, top_k=top_k, ragged=True, kv_type=config.kv_type, dtype=config.dtype
        )
        check_case(case, page_size, config=config)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_small_case(config: MlaConfig) -> None:
    small_case(config)


@pytest.mark.parametrize("rows", [LATENT_SWAP_AB_ROWS, ROWS])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, kind: str, rows: int) -> None:
    """compute-sanitizer finds nothing in the kernels."""
    check_sanitized(tool, __file__, kind, rows)


if __name__ == "__main__":
    asked = sys.argv[1] == "sparse", int(sys.argv[2])
    for each in SHIPPED:
        if (each.sparse, each.rows) == asked and each.box_rows in (0, 16, 64):
            small_case(each)
            print(each.name, flush=True)
