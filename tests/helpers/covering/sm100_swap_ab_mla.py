"""Chooses the tcgen05 MLA kernels of few rows that tests compile and run."""

from __future__ import annotations

from helpers.covering.configs import PAGES16, PAGES64, ROWS, TOPK
from hopwell.kernels import support
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.mla.config import Sm100SwapABMlaConfig

PAGES8, PAGES32 = (KvFetch.PAGE_BOXES, 8), (KvFetch.PAGE_BOXES, 32)


def covering_swap_ab_mla_configs() -> list[Sm100SwapABMlaConfig]:
    """Return MLA kernels of few rows that stand for all: each type with each width and with each fetch.

    Types and widths decide the products, and a fetch the code of the loads.
    """
    wide, narrow = support.MLA_HEAD_DIMS
    *_, unrotated = support.SPARSE_MLA_HEAD_DIMS
    operands = KvType.WIDE
    chosen = [
        ("sm_100a", "bf16", operands, wide, PAGES64),
        ("sm_103a", "bf16", operands, wide, PAGES8),
        ("sm_100a", "bf16", operands, wide, PAGES32),
        ("sm_100a", "bf16", operands, wide, TOPK),
        ("sm_103a", "bf16", operands, narrow, ROWS),
        ("sm_100a", "bf16", operands, narrow, PAGES16),
        ("sm_100a", "bf16", operands, unrotated, TOPK),
        ("sm_100a", "fp16", operands, wide, PAGES64),
        ("sm_103a", "fp16", operands, narrow, TOPK),
        ("sm_103a", "e4m3", operands, wide, PAGES64),
        ("sm_100a", "e4m3", operands, wide, ROWS),
        ("sm_100a", "e4m3", operands, narrow, PAGES8),
        ("sm_100a", "e4m3", operands, narrow, PAGES16),
        ("sm_100a", "e4m3", operands, narrow, PAGES32),
        ("sm_100a", "e4m3", operands, unrotated, TOPK),
        ("sm_100a", "bf16", KvType.E4M3, wide, ROWS),
        ("sm_103a", "bf16", KvType.E4M3, narrow, TOPK),
        ("sm_100a", "bf16", KvType.E4M3, unrotated, TOPK),
        ("sm_103a", "fp16", KvType.E4M3, wide, ROWS),
        ("sm_103a", "bf16", KvType.FP8_DS_MLA, wide, ROWS),
        ("sm_100a", "bf16", KvType.FP8_DS_MLA, wide, TOPK),
    ]
    return [
        Sm100SwapABMlaConfig(
            arch,
            dtype,
            "bf16" if dtype == "e4m3" else dtype,
            *dims,
            MaskKind.CAUSAL,
            *fetch,
            kv_type,
            LATENT_SWAP_AB_ROWS,
        )
        for arch, dtype, kv_type, dims, fetch in chosen
    ]


COVERING_SWAP_AB_MLA = covering_swap_ab_mla_configs()
