"""Cases of prefill by operand types. The emulated cases are few, because a step takes up to a second."""

from __future__ import annotations

import torch

from helpers.batches.prefill import CAUSAL, FULL, chunked, window
from hopwell.kernels.problem import Score, ScoreKind

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# (head dims, page size, mask): boxes of every size and rows, Q kept in registers or read again, one warpgroup and two.
SM120_CASES = [
    ((128, 128), None, CAUSAL, {}),
    ((128, 128), 16, window(70), {}),
    ((64, 64), 4, CAUSAL, {}),
    ((192, 128), 16, FULL, {}),
    ((256, 256), 64, CAUSAL, {}),
    ((72, 72), None, chunked(64), {}),
    ((128, 128), 16, CAUSAL, dict(skip_softmax=1e-30)),
    ((64, 64), None, CAUSAL, dict(score=Score(ScoreKind.CAPPED_ALIBI, 5.0))),
]

# (head dims, page size, mask, output): boxes of every size and rows, head dims that fill no block, several parts of V.
E4M3_CASES = [
    ((128, 128), None, CAUSAL, BF16),
    ((128, 128), 16, CAUSAL, E4M3),
    ((128, 128), 64, window(70), FP16),
    ((64, 64), 32, CAUSAL, E4M3),
    ((64, 64), 4, FULL, BF16),
    ((192, 128), 16, CAUSAL, BF16),
    ((192, 192), 32, CAUSAL, FP16),
    ((256, 256), 64, CAUSAL, E4M3),
    ((80, 80), 16, chunked(64), BF16),
    ((32, 32), 8, CAUSAL, E4M3),
    ((512, 512), 16, CAUSAL, BF16),
    ((512, 512), 4, window(70), E4M3),
    ((144, 144), None, CAUSAL, BF16),
    ((40, 40), 4, CAUSAL, BF16),
    ((40, 40), 16, window(70), E4M3),
    ((248, 248), 64, CAUSAL, FP16),
]
E4M3_EMULATED = [
    *(("sm_100a", E4M3_CASES[i]) for i in (2, 3, 4, 5)),
    ("sm_103a", E4M3_CASES[2]),
    *(("sm_90a", E4M3_CASES[i]) for i in (0, 3, 7, 8, 10, 13)),
    *(("sm_120a", E4M3_CASES[i]) for i in (1, 5, 7, 8, 11, 14)),
]

# (head dims, page size, mask): boxes of every size and rows, one and two column blocks, head dims that fill no block.
FP8_CACHE_CASES = [
    ((128, 128), 16, CAUSAL),
    ((128, 128), 64, window(70)),
    ((64, 64), 32, CAUSAL),
    ((64, 64), 4, FULL),
    ((192, 128), 16, CAUSAL),
    ((256, 256), 64, CAUSAL),
    ((80, 80), 16, chunked(64)),
    ((128, 128), None, CAUSAL),
    ((512, 512), 16, CAUSAL),
    ((40, 40), 4, CAUSAL),
    ((208, 208), 16, window(70)),
    ((168, 168), None, FULL),
]
# A smaller set, since an emulated step takes a second.
FP8_CACHE_EMULATED = [
    *(("sm_90a", FP8_CACHE_CASES[i]) for i in (0, 3, 4, 5, 8, 9)),
    *(("sm_100a", FP8_CACHE_CASES[i]) for i in (0, 1, 3, 4, 6, 7, 9)),
    *(("sm_120a", FP8_CACHE_CASES[i]) for i in (0, 3, 4, 5, 6, 8, 9)),
]

# (head dims, page size, mask, query): boxes of every size and rows, steps of 64, 96 and 128 keys, one and two threads
# for a row.
NVFP4_CASES = [
    ((128, 128), 16, CAUSAL, BF16),
    ((128, 128), 64, window(70), FP16),
    ((64, 64), 32, FULL, BF16),
    ((64, 64), 4, CAUSAL, E4M3),
    ((192, 128), 16, CAUSAL, FP16),
    ((192, 192), 32, CAUSAL, BF16),
    ((256, 256), 64, CAUSAL, E4M3),
    ((128, 128), 12, CAUSAL, E4M3),
    ((64, 64), 16, window(70), BF16),  # row slices with 2 scales of K, and with 6
    ((192, 128), 32, window(70), FP16),
]
# Cases with linear scales of V. 12 tokens are uneven pages; pages of 6 tokens are uneven and need linear scales.
LINEAR_CASES = [*NVFP4_CASES, ((64, 64), 6, window(70), BF16), ((128, 128), 1, CAUSAL, FP16)]
LINEAR_EMULATED = [
    *(("sm_90a", LINEAR_CASES[i]) for i in (6, 10)),
    *(("sm_100a", LINEAR_CASES[i]) for i in (9, 10)),
    ("sm_120a", LINEAR_CASES[10]),
]
NVFP4_EMULATED = [
    *(("sm_90a", NVFP4_CASES[i]) for i in (0, 3, 5, 6, 7, 8)),
    *(("sm_100a", NVFP4_CASES[i]) for i in (0, 1, 3, 4, 7, 8)),
    *(("sm_120a", NVFP4_CASES[i]) for i in (0, 3, 5, 9)),
]
