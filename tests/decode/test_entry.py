"""``xqa_batch_decode_with_kv_cache`` in every input form, on the GPU and in the emulator, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.decode import FULL, DecodeBatch
from helpers.calls.entries import cache_forms, xqa
from helpers.cases.decode import draft_bits

from hopwell.decode import pack_mask
from hopwell.kernels import support
from hopwell.kernels.problem import Mask, MaskKind

KV_LENS = [70, 0, 3, 530, 17]


def batch(device: str, q_len: int = 1, **options: Any) -> DecodeBatch:
    bits = [draft_bits("tree", q_len, seed) for seed in range(len(KV_LENS))]
    return DecodeBatch([q_len] * len(KV_LENS), KV_LENS, device=device, drafts=bits, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("kv_dtype", "heads"), [(None, 4), (torch.float8_e4m3fn, 4), (torch.int8, 36)], ids=["wide", "e4m3", "int8"]
)
def test_caches(kv_dtype: torch.dtype | None, heads: int, page_size: int, device: str) -> None:
    """Every placement of K and V, and every bound of lengths, gives the same bits."""
    data = batch(device, kv_dtype=kv_dtype, heads=heads)
    problem = data.decode(page_size)
    forms = cache_forms(problem.key, problem.value)
    outs = [xqa(data, problem, kv_cache=cache, kv_layout=layout) for cache, layout in forms]
    data.expected_decode().check(outs[0])
    stacked = torch.stack((problem.key, problem.value), 1)  # whose V has strides that the other K does not have
    outs += [xqa(data, problem, kv_cache=(problem.key, stacked[:, 1])), xqa(data, problem, max_seq_len=10**6)]
    outs += [xqa(data, problem, enable_pdl=pdl) for pdl in (True, False)]
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_tensor_for_both(layout: str, device: str) -> None:
    data = batch(device)
    data.v = data.k
    problem = data.decode(16)
    key = problem.key if layout == "HND" else problem.key.transpose(1, 2).contiguous()
    data.expected_decode().check(xqa(data, problem, kv_cache=key[:, None], kv_layout=layout))


@pytest.mark.parametrize("left", [-1, 30])
def test_drafts(left: int, device: str) -> None:
    """An allocated result is 4-D, a given one is returned unchanged; rows between the output's rows keep their
    contents.
    """
    data, q_len, mask = batch(device, q_len=4), 4, Mask(MaskKind.DRAFT, left)
    problem = data.decode(16, mask)
    expected = data.expected_decode(mask)
    out = xqa(data, problem, q_len, window_left=left)
    assert out.shape == (data.size, q_len, data.heads, data.head_dim)
    expected.check(out.flatten(0, 1))
    words = pack_mask(torch.stack([bits.to(device) for bits in data.drafts]))
    assert torch.equal(xqa(data, problem, q_len, window_left=left, mask=words), out)
    room = torch.full((data.tokens, 5, 136), 7.0, dtype=data.dtype, device=device)
    flat = room[:, 1:, :128]
    for given in (flat, flat.unflatten(0, (data.size, q_len))):
        room.fill_(7.0)
        assert xqa(data, problem, q_len, window_left=left, out=given) is given
        assert torch.equal(flat, out.flatten(0, 1))
        assert (room[:, 0] == 7).all()
        assert (room[..., 128:] == 7).all()


def test_query_of_other_strides(device: str) -> None:
    data = batch(device)
    problem = data.decode(16)
    plain = xqa(data, problem)
    packed = torch.full((data.tokens, 3, 4, 128), torch.nan, dtype=data.dtype, device=device)[:, 1]
    heads_first = torch.empty(4, data.tokens, 128, dtype=data.dtype, device=device).transpose(0, 1)
    for query in (packed, heads_first):
        query.copy_(data.q)
        assert torch.equal(plain, xqa(data, problem, query=query))


def test_scales_sinks_and_window(device: str) -> None:
    """A 16-bit output has both factors, as floats or tensors."""
    data, mask = batch(device), Mask(MaskKind.SLIDING_WINDOW, 50)
    problem = data.decode(16, mask)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device)
    options: dict[str, Any] = dict(window_left=50, sinks=sinks)
    scales = dict(bmm1_scale=data.scale, bmm2_scale=-1.5, o_scale=0.5)
    out = xqa(data, problem, **options, **scales)
    data.expected_decode(mask, sinks=sinks).check(out, factor=-0.75)
    tensors = {name: torch.tensor([value], device=device) for name, value in scales.items()}
    assert torch.equal(out, xqa(data, problem, **options, **tensors))


# Few rows of each KV head, and many, have a kernel of their own.
both_kernels = pytest.mark.parametrize("heads", [4, 36])


@pytest.mark.parametrize(("page_size", "heads"), [(7, 4), (24, 36)])
def test_pages_of_any_size(page_size: int, heads: int, device: str) -> None:
    data = batch(device, heads=heads)
    out = xqa(data, data.decode(page_size))
    data.expected_decode().check(out)
    assert torch.equal(out, xqa(data, data.decode(16)))


@both_kernels
def test_index_types(heads: int, device: str) -> None:
    """64-bit lengths and page ids, and bfloat16 sinks, give the bits of 32-bit ones and float32."""
    data = batch(device, heads=heads)
    problem = data.decode(16)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    narrow = xqa(data, problem, sinks=sinks.float())
    data.expected_decode(sinks=sinks.float()).check(narrow)
    ids, lengths = problem.page_table.key.long(), problem.kv_lens.long()
    assert torch.equal(narrow, xqa(data, problem, sinks=sinks, block_tables=ids, seq_lens=lengths))


@both_kernels
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_caches_of_8_bits(kv_dtype: torch.dtype, heads: int, device: str) -> None:
    data = batch(device, kv_dtype=kv_dtype, heads=heads)
    data.expected_decode().check(xqa(data, data.decode(16)))


@both_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_caches_of_8_bits_agree(dtype: torch.dtype, heads: int, device: str) -> None:
    """Numbers that both types can represent give the same bits."""
    data = batch(device, kv_dtype=torch.float8_e4m3fn, dtype=dtype, heads=heads)
    problem = data.decode(16)
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(-8, 9, pool.shape, generator=generator) for pool in (problem.key, problem.value)]
    caches = [tuple(pool.to(kv).to(device) for pool in numbers) for kv in (torch.float8_e4m3fn, torch.int8)]
    first, second = (xqa(data, problem, kv_cache=cache, bmm1_scale=data.scale / 64) for cache in caches)
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "page_size", "head_dim", "heads"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, 16, 512, 24),
        (torch.int8, torch.float16, 3, 512, 24),
        (torch.float8_e4m3fn, torch.bfloat16, 4, 160, 80),
    ],
    ids=["e4m3", "int8", "many-rows"],
)
def test_wide_heads_and_many_rows_over_8_bits(
    kv_dtype: torch.dtype, dtype: torch.dtype, page_size: int, head_dim: int, heads: int, device: str
) -> None:
    """Hopper's kernels of these shapes and rows have no leaves.

    They dequantize the cache in shared memory, so bits equal a 16-bit cache with the same values.

    Kernels of sm_120 dequantize in registers, and sum in another order.
    """
    data = batch(device, kv_dtype=kv_dtype, dtype=dtype, heads=heads, head_dim=head_dim)
    problem = data.decode(page_size)
    out = xqa(data, problem)
    data.expected_decode().check(out)
    if support.arch_of(torch.device(device)) == "sm_90a":
        wide = tuple(pool.to(dtype) for pool in (problem.key, problem.value))
        assert torch.equal(out, xqa(data, problem, kv_cache=wide))


@both_kernels
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**18], ids=["small", "large"])
def test_queries_beyond_float16_over_8_bits(magnitude: float, heads: int, device: str) -> None:
    """Such caches are multiplied in float16, whose exponents are fewer than bfloat16's; each row has its
    own exponent.
    """
    data = batch(device, kv_dtype=torch.float8_e4m3fn, heads=heads)
    problem = data.decode(16)
    out = xqa(data, problem)
    data.q = data.q * torch.tensor([1.0, magnitude], device=device).repeat(data.heads // 2).view(-1, 1).bfloat16()
    scaled = xqa(data, problem)
    assert torch.equal(scaled[:, ::2], out[:, ::2])
    data.expected_decode().check(scaled)


@both_kernels
@pytest.mark.parametrize(
    ("mask", "head_dim"),
    [(FULL, 128), (Mask(MaskKind.SLIDING_WINDOW, 30), 256), (Mask(MaskKind.DRAFT, 30), 128)],
    ids=["full", "window", "draft"],
)
def test_fp8_output(mask: Mask, head_dim: int, heads: int, device: str) -> None:
    """The output has one factor, without o_scale."""
    fp8, q_len = torch.float8_e4m3fn, 4 if mask.kind is MaskKind.DRAFT else 1
    data = batch(device, q_len, kv_dtype=fp8, heads=heads, head_dim=head_dim)
    out = torch.empty(data.q.shape, dtype=fp8, device=device)
    given = out if q_len == 1 else out.unflatten(0, (data.size, q_len))
    options: dict[str, Any] = dict(window_left=mask.window_left, out=given, o_scale=0.25)
    assert xqa(data, data.decode(16, mask), q_len, **options) is given
    data.expected_decode(mask, out_dtype=fp8).check(out)


@both_kernels
def test_fp8_output_saturates(heads: int, device: str) -> None:
    """float8 has no infinity, so a value beyond its largest number becomes that number."""
    fp8, factor = torch.float8_e4m3fn, 2000.0
    data = batch(device, kv_dtype=fp8, heads=heads)
    out = xqa(data, data.decode(16), out=torch.empty(data.q.shape, dtype=fp8, device=device), bmm2_scale=factor)
    largest, exact = torch.finfo(fp8).max, data.expected_decode().out * factor
    beyond = exact.abs() > 1.1 * largest
    assert beyond.any()
    assert torch.equal(out.double()[beyond], largest * exact[beyond].sign())


def test_repeated_with_other_tensors(device: str) -> None:
    """Repeated calls take a short path; they must see every new address, length and value."""
    calls = []
    for seed in range(3):
        data = batch(device, seed=seed)
        calls.append((data, data.decode(16)))
    for data, problem in calls * 2:
        data.expected_decode().check(xqa(data, problem))


def test_masks_of_single_tokens_are_ignored(device: str) -> None:
    data = batch(device)
    problem = data.decode(16)
    none = torch.zeros(data.size, 1, 2, dtype=torch.uint16, device=device)
    assert torch.equal(xqa(data, problem), xqa(data, problem, mask=none))
