"""Decode against float64: every page size, group, number of new tokens, head dim and cache type, and exact masks."""

from __future__ import annotations

import pytest
import torch
from decode_batches import DecodeBatch
from decode_cases import HEAD_DIMS, Case, check_config, config_for, draft_bits

from hopwell.kernels import execute
from hopwell.kernels.config import KvType
from hopwell.kernels.decode_config import HEAD_DIMS as ALL_HEAD_DIMS
from hopwell.kernels.problem import Mask, MaskKind
from hopwell.kernels.support import DECODE_8BIT_HEAD_DIMS

pytestmark = pytest.mark.gpu

PAGE_SIZES = [1 << i for i in range(11)]
FULL, WINDOW, DRAFT = MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT


def lengths(chunk: int, page: int) -> list[int]:
    """Around the sizes that kernels work in, and long enough for merges in one level and in two."""
    return [0, 1, page, page + 1, 63, 64, 65, chunk - 1, chunk, chunk + 1, 3 * chunk + 5, 17 * chunk, 40 * chunk + 9]


@pytest.mark.parametrize("group", [4, 33])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_page_sizes(dtype: str, head_dim: int, mask: MaskKind, page_size: int, group: int) -> None:
    q_len = 5 if mask is DRAFT else 1
    config = config_for(head_dim, mask, page_size, dtype, rows=group * q_len)
    kv_lens = lengths(config.chunk_tokens, page_size)
    check_config(config, Case([q_len] * len(kv_lens), kv_lens, group, kv_heads=2, window=100), page_size)


@pytest.mark.parametrize("group", [1, 4, 33])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
@pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", sorted({64, 128, 256} & set(DECODE_8BIT_HEAD_DIMS)))
@pytest.mark.parametrize("kv_type", [KvType.E4M3, KvType.INT8], ids=lambda kv_type: kv_type.value)
def test_caches_of_8_bits(kv_type: KvType, head_dim: int, mask: MaskKind, page_size: int, group: int) -> None:
    q_len = 5 if mask is DRAFT else 1
    config = config_for(head_dim, mask, page_size, kv_type=kv_type, rows=group * q_len)
    kv_lens = lengths(config.chunk_tokens, page_size)
    check_config(config, Case([q_len] * len(kv_lens), kv_lens, group, kv_heads=2, window=100), page_size)


@pytest.mark.parametrize("group", [7, 33])
@pytest.mark.parametrize("kv_type", KvType, ids=lambda kv_type: kv_type.value)
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_other_head_dims(head_dim: int, kv_type: KvType, group: int) -> None:
    if kv_type is not KvType.WIDE and head_dim not in DECODE_8BIT_HEAD_DIMS:
        pytest.skip("has no kernel")
    config = config_for(head_dim, FULL, 16, kv_type=kv_type, rows=group)
    kv_lens = lengths(config.chunk_tokens, 16)
    check_config(config, Case([1] * len(kv_lens), kv_lens, group), 16)


@pytest.mark.parametrize(
    ("head_dim", "kv_type"), [*((dim, KvType.WIDE) for dim in HEAD_DIMS), (128, KvType.E4M3), (256, KvType.E4M3)]
)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 63, 64])
def test_groups(group: int, head_dim: int, kv_type: KvType) -> None:
    config = config_for(head_dim, FULL, 16, kv_type=kv_type, rows=group)
    kv_lens = lengths(config.chunk_tokens, 16)
    check_config(config, Case([1] * len(kv_lens), kv_lens, group, kv_heads=3), 16)


@pytest.mark.parametrize("drafts", ["tree", "linear", "full", "any", "none"])
@pytest.mark.parametrize("q_len", [*range(1, 10), 15, 16, 17, 31, 32, 33, 64, 65])
def test_new_tokens(q_len: int, drafts: str) -> None:
    for head_dim, group, window in ((64, 1, -1), (128, 5, 40), (256, 16, 0), (512, 2, 1000)):
        config = config_for(head_dim, DRAFT, 16, rows=group * q_len)
        kv_lens = [0, max(q_len - 1, 0), q_len, q_len + 1, 63 + q_len, *lengths(config.chunk_tokens, 16)[-6:]]
        case = Case([q_len] * len(kv_lens), kv_lens, group, window=window, drafts=drafts)
        check_config(config, case, 16)


@pytest.mark.parametrize("group", [4, 33])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 8.0])
def test_magnitudes(magnitude: float, head_dim: int, group: int) -> None:
    """From uniform attention to rows that see few keys."""
    config = config_for(head_dim, FULL, 16, rows=group)
    kv_lens = lengths(config.chunk_tokens, 16)[-4:]
    check_config(config, Case([1] * 4, kv_lens, group, magnitude=magnitude, sinks=False), 16)


def one_hot(data: DecodeBatch) -> None:
    """Equal keys give each visible one the same weight, and then the output counts them: one too many or too few
    changes an element by far more than rounding, which random values would hide."""
    for k, v in zip(data.k, data.v, strict=True):
        k.fill_(0.5)
        v.zero_()
        index = torch.arange(v.shape[0], device=v.device)
        v[index, :, index % data.head_dim] = 1.0


def counts_match(data: DecodeBatch, mask: Mask, page_size: int) -> None:
    out = execute(data.decode(page_size, mask)).double()
    exact = data.expected_decode(mask).out
    assert ((out - exact).abs() <= 2**-7 * exact).all()


@pytest.mark.parametrize("group", [2, 33])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_are_exact(head_dim: int, page_size: int, group: int) -> None:
    chunk = config_for(head_dim, WINDOW, page_size, rows=group).chunk_tokens
    kv_lens = lengths(chunk, page_size)[:-2]
    data = DecodeBatch([1] * len(kv_lens), kv_lens, heads=2 * group, head_dim=head_dim)
    one_hot(data)
    for left in (0, 1, 31, 32, 62, 63, 64, 65, chunk - 2, chunk - 1, chunk, chunk + 1, 100_000):
        counts_match(data, Mask(WINDOW, left), page_size)
    counts_match(data, Mask(FULL), page_size)


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("q_len", [2, 8, 31, 32, 33, 70])
def test_drafts_are_exact(q_len: int, head_dim: int, page_size: int) -> None:
    group = 2
    chunk = config_for(head_dim, DRAFT, page_size, rows=group * q_len).chunk_tokens
    kv_lens = [q_len - 1, q_len, 64 + q_len // 2, chunk + q_len // 2, 2 * chunk + 1]
    bits = [draft_bits("any", q_len, seed) for seed in range(len(kv_lens))]
    data = DecodeBatch([q_len] * len(kv_lens), kv_lens, heads=2 * group, head_dim=head_dim, drafts=bits)
    one_hot(data)
    for left in (-1, 0, 3, 40, chunk):
        counts_match(data, Mask(DRAFT, left), page_size)
