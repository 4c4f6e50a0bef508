"""Keys inside a request that no row sees: NaN there has no effect, as after the end or behind a window.

The request's keys are at the same places with and without the NaN, so results must be bitwise equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.decode import DRAFT, NVFP4, DecodeBatch
from helpers.cases.decode import draft_bits

from hopwell import decode
from hopwell.kernels import execute
from hopwell.kernels.problem import LogSumExp, LseLayout

Q_LENS, KV_LENS = [5, 1, 4, 3, 6], [200, 64, 4, 2, 70]
HIDDEN = (1, 2)  # new tokens whose bits are 0 in every row
FP8 = torch.float8_e4m3fn
ARCHES = ["sm_90a", "sm_100a", "sm_120a"]


@pytest.fixture(params=ARCHES)
def emulated(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels of each architecture if the device is the emulator."""
    if device == "cpu":
        monkeypatch.setenv("HOPWELL_EMULATE", request.param)
    elif request.param != ARCHES[0]:
        pytest.skip("a GPU has its own kernels")


def poisoned(data: DecodeBatch) -> DecodeBatch:
    """Return the batch with NaN in the keys and values of hidden new tokens."""
    one = replace(data)
    one.q, one.drafts = data.q, data.drafts
    one.k, one.v = ([own.clone() for own in tokens] for tokens in (data.k, data.v))
    for own in (*one.k, *one.v):
        index = KV_LENS.index(len(own))
        hidden = [len(own) - Q_LENS[index] + token for token in HIDDEN if token < Q_LENS[index]]
        own[[key for key in hidden if key >= 0]] = torch.nan
    return one


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("kv_dtype", "heads", "page_size", "window"),
    [
        (None, 2, 16, -1),
        (None, 10, 1, 2),
        (None, 24, 16, 2),
        (FP8, 2, 16, 2),
        (FP8, 24, 1, -1),
        (NVFP4, 2, 16, 2),
        (NVFP4, 10, 16, -1),
        (NVFP4, 2, 1, -1),
    ],
)
def test_new_tokens_that_the_draft_mask_hides(
    kv_dtype: torch.dtype | None, heads: int, page_size: int, window: int, device: str
) -> None:
    bits = [draft_bits("tree", n, seed) for seed, n in enumerate(Q_LENS)]
    for own in bits:
        own[:, [token for token in HIDDEN if token < len(own)]] = False
    sizes: dict[str, Any] = dict(heads=heads, kv_heads=2, head_dim=128, device=device)
    data = DecodeBatch(Q_LENS, KV_LENS, drafts=bits, kv_dtype=kv_dtype, **sizes)
    mask = replace(DRAFT, window_left=window)
    outs = []
    for one in (data, poisoned(data)):
        lse = LogSumExp(torch.full((data.tokens, heads), torch.nan, device=device), LseLayout.RAGGED, natural=True)
        outs.append((execute(one.decode(page_size, mask, ragged=True, lse=lse)), lse.tensor))
    data.expected_decode(mask).check(outs[0][0])
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*outs, strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["wide", "e4m3"])
@pytest.mark.parametrize("heads", [2, 40])
def test_keys_of_a_rank_behind_its_bound(kv_dtype: torch.dtype | None, heads: int, device: str) -> None:
    """The rank holds 150 keys, of which 70 are among the request's 140 on both ranks."""
    have, bound, world = 150, 140, 2
    sizes: dict[str, Any] = dict(heads=heads, kv_heads=1, head_dim=128, device=device, kv_dtype=kv_dtype)
    data = DecodeBatch([1], [have], **sizes)
    outs = []
    for value in (1.0, torch.nan):
        data.k[0][bound // world :] = value
        data.v[0][bound // world :] = value
        problem = data.decode(16)
        arguments = (
            data.q,
            (problem.key, problem.value),
            problem.scratch,
            problem.page_table.key,
            problem.kv_lens,
            have,
        )
        options = dict(cp_world=world, cp_rank=0, causal_seqlens_kv_global=data.ints([bound]), return_lse=True)
        outs.append(decode.trtllm_batch_decode_with_kv_cache(*arguments, data.scale, kv_layout="HND", **options))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*outs, strict=True))
    seen = replace(data, kv_lens=[bound // world])
    seen.q, seen.k, seen.v = data.q, [data.k[0][: bound // world]], [data.v[0][: bound // world]]
    seen.expected_decode().check(outs[1][0])
