"""Decode against float64: every page size, group, number of new tokens, head dim and cache type, and exact masks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.batches.decode import DecodeBatch
from helpers.cases.decode import HEAD_DIMS, Case, batch_of, check_config, config_for, cut_tokens

from hopwell.kernels import execute
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import HEAD_DIMS as ALL_HEAD_DIMS
from hopwell.kernels.config.splitting import LONG_TOKENS, MAX_CHUNKS
from hopwell.kernels.problem import Mask, MaskKind

pytestmark = pytest.mark.gpu

PAGE_SIZES = [1 << i for i in range(11)]
FULL, WINDOW, DRAFT = MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT
WIDE, E4M3, INT8, NVFP4 = KvType.WIDE, KvType.E4M3, KvType.INT8, KvType.NVFP4


def lengths(chunk: int, page: int) -> list[int]:
    """Return lengths around the sizes of the kernels' tiles, and lengths with combines in one and two levels."""
    return [0, 1, page, page + 1, 63, 64, 65, chunk - 1, chunk, chunk + 1, 3 * chunk + 5, 17 * chunk, 40 * chunk + 9]


@pytest.mark.parametrize("group", [4, 33])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_page_sizes(dtype: str, head_dim: int, mask: MaskKind, page_size: int, group: int) -> None:
    q_len = 5 if mask is DRAFT else 1
    config = config_for(head_dim, mask, page_size, dtype, rows=group * q_len)
    kv_lens = lengths(cut_tokens(config), page_size)
    check_config(config, Case([q_len] * len(kv_lens), kv_lens, group, kv_heads=2, window=100), page_size)


@pytest.mark.parametrize("group", [1, 4, 17, 33])
@pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.value)
@pytest.mark.parametrize(
    ("kv_type", "head_dim", "page_size"),
    [
        *product((E4M3, INT8, NVFP4), (64, 128, 256), [1, 8, 16, 64, 256]),
        *product((E4M3, INT8), (512,), [1, 8, 16, 64, 256]),
        *((kv_type, *sizes) for kv_type in (E4M3, INT8, NVFP4) for sizes in ((64, 2), (128, 32), (256, 1024))),
    ],
)
def test_narrow_caches(kv_type: KvType, head_dim: int, mask: MaskKind, page_size: int, group: int) -> None:
    q_len = 5 if mask is DRAFT else 1
    config = config_for(head_dim, mask, page_size, kv_type=kv_type, rows=group * q_len)
    kv_lens = lengths(cut_tokens(config), page_size)
    check_config(config, Case([q_len] * len(kv_lens), kv_lens, group, kv_heads=2, window=100), page_size)


@pytest.mark.parametrize(
    ("head_dim", "kv_type", "group", "q_len"),
    [
        *((dim, WIDE, group, 1) for dim, group in product(ALL_HEAD_DIMS, (7, 33))),
        *((dim, kv_type, group, 1) for dim, kv_type, group in product(ALL_HEAD_DIMS, (E4M3, INT8), (7, 17, 33))),
        # The larger trees, and one that has drafts.
        (208, WIDE, 16, 1),
        (112, WIDE, 32, 1),
        (80, WIDE, 6, 5),
    ],
)
def test_other_head_dims(head_dim: int | tuple[int, int], kv_type: KvType, group: int, q_len: int) -> None:
    config = config_for(head_dim, FULL if q_len == 1 else DRAFT, 16, kv_type=kv_type, rows=group * q_len)
    kv_lens = lengths(cut_tokens(config), 16)
    check_config(config, Case([q_len] * len(kv_lens), kv_lens, group), 16)


@pytest.mark.parametrize(
    ("head_dim", "kv_type"),
    [*((dim, WIDE) for dim in HEAD_DIMS), *((dim, E4M3) for dim in (128, 256, 512)), (128, NVFP4)],
)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 63, 64])
def test_groups(group: int, head_dim: int, kv_type: KvType) -> None:
    config = config_for(head_dim, FULL, 16, kv_type=kv_type, rows=group)
    kv_lens = lengths(cut_tokens(config), 16)
    check_config(config, Case([1] * len(kv_lens), kv_lens, group, kv_heads=3), 16)


# (head dim, cache, group, window)
WIDE_DRAFTS = [(64, WIDE, 1, -1), (128, WIDE, 5, 40), (256, WIDE, 16, 0), (512, WIDE, 2, 1000)]
NARROW_DRAFTS = [(128, E4M3, 1, 40), (256, INT8, 5, 3), (512, E4M3, 2, 1000), (64, NVFP4, 2, 40), (256, NVFP4, 3, -1)]


@pytest.mark.parametrize("drafts", ["tree", "linear", "full", "any", "none"])
@pytest.mark.parametrize(
    ("q_len", "kernels"),
    [
        *((n, WIDE_DRAFTS) for n in (*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 65)),
        *((n, NARROW_DRAFTS) for n in (2, 8, 17, 33, 65)),
    ],
    ids=lambda value: value if isinstance(value, int) else value[0][1].value,
)
def test_new_tokens(q_len: int, kernels: list[tuple[int, KvType, int, int]], drafts: str) -> None:
    for head_dim, kv_type, group, window in kernels:
        config = config_for(head_dim, DRAFT, 16, kv_type=kv_type, rows=group * q_len)
        kv_lens = [0, max(q_len - 1, 0), q_len, q_len + 1, 63 + q_len, *lengths(cut_tokens(config), 16)[-6:]]
        case = Case([q_len] * len(kv_lens), kv_lens, group, window=window, drafts=drafts)
        check_config(config, case, 16)


@pytest.mark.parametrize("group", [4, 33])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 8.0])
def test_magnitudes(magnitude: float, head_dim: int, group: int) -> None:
    """Attention ranges from uniform to rows dominated by few keys."""
    config = config_for(head_dim, FULL, 16, rows=group)
    kv_lens = lengths(cut_tokens(config), 16)[-4:]
    check_config(config, Case([1] * 4, kv_lens, group, magnitude=magnitude, sinks=False), 16)


@pytest.mark.parametrize("mask", [FULL, WINDOW], ids=lambda mask: mask.value)
@pytest.mark.parametrize("kv_type", [WIDE, E4M3], ids=lambda kv_type: kv_type.value)
def test_chunks_of_other_lengths(kv_type: KvType, mask: MaskKind) -> None:
    """Requests of middle length have half chunks; requests with too many chunks have longer ones.

    The last request's window has the maximum number of keys, but begins within a chunk.
    """
    config = config_for(128, mask, 16, kv_type=kv_type, rows=33)
    most = MAX_CHUNKS * config.chunk_tokens
    for kv_len in (LONG_TOKENS - 1, LONG_TOKENS, most, most + 1):
        check_config(config, Case([1], [kv_len], group=33, window=most - 1), 16)


def one_hot(data: DecodeBatch) -> None:
    """Return the batch with equal keys and one-hot values, so that the output counts the visible keys.

    One key too many or too few changes an element far more than rounding, which random values would hide.
    """
    for k, v in zip(data.k, data.v, strict=True):
        k.fill_(1.0)
        v.zero_()
        index = torch.arange(v.shape[0], device=v.device)
        v[index, :, index % data.head_dim] = 1.0


def counts_match(data: DecodeBatch, mask: Mask, page_size: int) -> None:
    out = execute(data.decode(page_size, mask)).double()
    exact = data.expected_decode(mask).out
    assert ((out - exact).abs() <= 2**-7 * exact).all()


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize(
    ("head_dim", "kv_type", "group"),
    [
        *product(HEAD_DIMS, [WIDE], [2, 33]),
        (128, WIDE, 32),
        *product([128], [E4M3], [2, 33]),
        *product([256], [INT8], [2, 17, 33]),
        (512, E4M3, 33),
    ],
)
def test_windows_are_exact(head_dim: int, kv_type: KvType, group: int, page_size: int) -> None:
    config = config_for(head_dim, WINDOW, page_size, kv_type=kv_type, rows=group)
    chunk = cut_tokens(config)
    kv_lens = lengths(chunk, page_size)[:-2]
    data = batch_of(config, Case([1] * len(kv_lens), kv_lens, group, kv_heads=2), "cuda")
    one_hot(data)
    for left in (0, 1, 31, 32, 62, 63, 64, 65, chunk - 2, chunk - 1, chunk, chunk + 1, 100_000):
        counts_match(data, Mask(WINDOW, left), page_size)
    counts_match(data, Mask(FULL), page_size)


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize(
    ("head_dim", "kv_type", "q_len"),
    [
        *product(HEAD_DIMS, [WIDE], [2, 8, 31, 32, 33, 70]),
        *product([64, 128], [WIDE], [16]),
        *product([128], [E4M3], [2, 33, 70]),
        *product([256], [INT8], [2, 15, 33, 70]),
        (512, E4M3, 33),
    ],
)
def test_drafts_are_exact(head_dim: int, kv_type: KvType, q_len: int, page_size: int) -> None:
    group = 2
    config = config_for(head_dim, DRAFT, page_size, kv_type=kv_type, rows=group * q_len)
    chunk = cut_tokens(config)
    kv_lens = [q_len - 1, q_len, 64 + q_len // 2, chunk + q_len // 2, 2 * chunk + 1]
    case = Case([q_len] * len(kv_lens), kv_lens, group, kv_heads=2, drafts="any")
    data = batch_of(config, case, "cuda")
    one_hot(data)
    for left in (-1, 0, 3, 40, chunk):
        counts_match(data, Mask(DRAFT, left), page_size)
