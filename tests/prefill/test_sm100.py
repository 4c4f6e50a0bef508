"""The Blackwell prefill kernels in the emulator, against float64, in an ordinary and an adverse schedule.

These kernels have not run on a GPU. All of them run under the race detector, the proxy check and strict mode. Data that
a kernel must not read or must overwrite is NaN. Kernels take long to compile, so a few stand for all; the others run
with ``-m slow_emulator``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import Fp8Batch, to_e4m3
from helpers.batches.prefill import CAUSAL, FULL, Batch, chunked, same, window
from helpers.cases.emulated_prefill import check, page_sizes
from helpers.covering.configs import covering_blackwell_configs

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind, PageTable
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from tests.prefill import test_context_entry as context_entry
from tests.prefill import test_cudnn_entry as cudnn_entry
from tests.prefill import test_fmha_v2_entry as fmha_v2_entry

CONFIGS = covering_blackwell_configs()
ADVERSE = ("late", "random", "priority")
# Another dtype changes no loop, so one mask is enough for fp16.
REST = [
    config
    for config in shipped_configs("sm_100a")
    if isinstance(config, Sm100PrefillConfig)
    and config not in CONFIGS
    and (config.dtype == "bf16" or config.mask is MaskKind.CAUSAL)
]


def cases(configs: list[PrefillConfig]) -> Iterator[object]:
    for config in configs:
        for size in page_sizes(config):
            yield pytest.param(config, size, id=config.name + (f"-page{size}" if size else ""))


@pytest.mark.emulator
@pytest.mark.parametrize("is_adverse", [True, False], ids=["adverse", "eager"])
@pytest.mark.parametrize(("config", "page_size"), [*cases(CONFIGS)])
def test_prefill(config: PrefillConfig, page_size: int | None, is_adverse: bool) -> None:
    """Schedule and seed depend on the kernel, so that the kernels together see many of both."""
    seed = CONFIGS.index(config)
    schedule = ADVERSE[seed % len(ADVERSE)] if is_adverse else "eager"
    check(config, page_size, heads=2, kv_heads=1, schedule=schedule, seed=seed)


ULTRA = [
    Sm100PrefillConfig("sm_103a", "bf16", "bf16", 128, 128, MaskKind.CAUSAL, KvFetch.PAGE_BOXES, 16),
    Sm100PrefillConfig("sm_103a", "bf16", "bf16", 192, 128, MaskKind.SLIDING_WINDOW, KvFetch.PAGE_BOXES, 16),
    Sm100PrefillConfig("sm_103a", "bf16", "bf16", 64, 64, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0, skip_softmax=True),
    Sm100PrefillConfig("sm_103a", "bf16", "bf16", 256, 256, MaskKind.CAUSAL, KvFetch.PAGE_BOXES, 16),  # a pair of CTAs
]


@pytest.mark.emulator
@pytest.mark.parametrize("config", ULTRA, ids=lambda config: config.name)
def test_maximum_comes_with_the_load(config: Sm100PrefillConfig) -> None:
    """On sm_103a, the load of unmasked scores returns their maximum."""
    assert artifact(config).ptx.read_text().count("tcgen05.ld.red") == 2
    for schedule in ("eager", "random"):
        check(config, config.box_rows or None, heads=2, kv_heads=1, schedule=schedule, seed=3)


# Around tiles of 64 and 128 rows and of 128 keys; requests without queries or keys, and rows without keys.
Q_LENS, KV_LENS = [257, 0, 128, 65, 3, 129, 1], [385, 3, 256, 0, 129, 127, 128]


HEAD_DIMS = pytest.mark.parametrize("head_dim", [128, 256], ids=["single", "pair"])  # 256 has pairs of CTAs


def count_keys(data: Batch) -> None:
    """Give a batch equal keys and one-hot values."""
    for k, v in zip(data.k, data.v, strict=True):
        k.zero_()
        v.zero_()
        index = torch.arange(v.shape[0])
        v[index, :, index % v.shape[-1]] = 1.0


@pytest.mark.emulator
@HEAD_DIMS
@pytest.mark.parametrize(
    ("mask", "page_size"),
    [(CAUSAL, 16), (window(70), None), (chunked(64), 16), (FULL, 16)],
    ids=lambda value: value.kind.value if isinstance(value, Mask) else None,
)
def test_counts_of_keys_are_those_of_hopper(mask: Mask, page_size: int | None, head_dim: int) -> None:
    """With equal keys and one-hot values, a row's output counts its visible keys. Both architectures divide equal
    integers.
    """
    data = Batch(Q_LENS, KV_LENS, heads=2, kv_heads=1, device="cpu", head_dim=head_dim, v_head_dim=head_dim)
    count_keys(data)
    expected, outs, sums = data.expected(mask), [], []
    for arch in ("sm_90a", "sm_100a"):
        lse = data.ragged_lse()
        with emulator.use(arch):
            out = execute(data.problem(page_size, mask, lse=lse))
        expected.check(out)
        expected.check_lse(lse.tensor)
        outs.append(out)
        sums.append(lse.tensor)
    assert torch.equal(*outs)
    assert torch.equal(*sums)


def as_problem(data: Batch, **changes: Any) -> AttentionProblem:
    """Return a batch as a causal problem over pages of 16, in e4m3 if its values are of this type."""
    if isinstance(data, Fp8Batch):
        return data.in_fp8(16, CAUSAL, torch.bfloat16, **changes)
    return data.problem(16, **changes)


@pytest.mark.emulator
@HEAD_DIMS
def test_counts_of_keys_are_those_of_hopper_in_e4m3(head_dim: int) -> None:
    data = Fp8Batch(Q_LENS, KV_LENS, heads=2, kv_heads=1, device="cpu", head_dim=head_dim, v_head_dim=head_dim)
    count_keys(data)
    expected, found = data.expected(), []
    for arch in ("sm_90a", "sm_100a"):
        lse = data.ragged_lse()
        with emulator.use(arch):
            out = execute(as_problem(data, lse=lse))
        expected.check(out)
        expected.check_lse(lse.tensor)
        found.append(torch.cat([out.double(), lse.tensor[..., None]], -1))
    assert torch.equal(*found)


@pytest.mark.emulator
@pytest.mark.parametrize(("kind", "power"), [(Batch, 30), (Fp8Batch, 24)])
def test_logits_beyond_the_precision_of_float32(kind: type[Batch], power: int) -> None:
    """Equal keys share the weight, though the product of their logit and the scale is off by many powers of two."""
    data = kind([70], [300], heads=1, kv_heads=1, device="cpu")
    data.q.zero_()
    data.q[:, 0, 0] = 2.0 * torch.arange(8, 16).repeat(9)[:70]
    data.k[0].fill_(1.0)
    data.v[0].fill_(1.0)
    with emulator.use("sm_100a"):
        out = execute(as_problem(data, softmax_scale=1.01 * 2**power * math.log(2) / 30))
    assert ((out.double() - 1).abs() <= (2**-4 if kind is Fp8Batch else 0)).all()


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("key", [4, 9])
def test_a_key_that_is_not_a_number_shows(arch: str, key: int) -> None:
    """The NaN shows in all rows that see the key and in no other, for both the MUFU and polynomial exponentials."""
    data = Batch([130], [130], heads=1, kv_heads=1, device="cpu")
    data.k[0][key, 0, 3] = float("nan")
    with emulator.use(arch):
        out = execute(data.problem(16, CAUSAL))
    assert out.isfinite().all(dim=(1, 2))[:key].all()
    assert not out.isfinite().any(dim=(1, 2))[key:].any()


@pytest.mark.emulator
@HEAD_DIMS
@pytest.mark.parametrize("kind", [Batch, Fp8Batch])
def test_requests_alone_are_what_they_are_in_a_batch(kind: type[Batch], head_dim: int) -> None:
    data = kind(Q_LENS, KV_LENS, heads=2, kv_heads=1, device="cpu", head_dim=head_dim, v_head_dim=head_dim)
    with emulator.use("sm_100a", schedule="random"):
        together = execute(as_problem(data))
        alone = [execute(as_problem(data.request(index))) for index in range(data.size)]
    assert not together.isnan().any()
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.emulator
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(
    ("head_dim", "sms"),
    [(128, 1), (256, 1), (256, 2), (256, 6)],
    ids=["single", "pair on one SM", "pair", "three pairs"],
)
@pytest.mark.parametrize("schedule", ["late", "priority"])
def test_work_tiles_follow_each_other_in_a_cta(
    schedule: str, head_dim: int, sms: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mma warp issues scores of the next work tile before the CTA has finished this one, unless it has no keys. The
    CTA takes tiles with one step, with several and with none, of few or of more than 32 requests."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
    kv_lens = [300, 0, 0, 128, 5, 0, 400, 129, 1, 0] * repeats
    data = Batch([3] * len(kv_lens), kv_lens, heads=1, kv_heads=1, device="cpu", head_dim=head_dim, v_head_dim=head_dim)
    lse = data.ragged_lse()
    with emulator.use("sm_100a", schedule=schedule, race=True, proxy=True, strict=True):
        out = execute(data.problem(16, FULL, lse=lse))
    expected = data.expected(FULL)
    expected.check(out)
    expected.check_lse(lse.tensor)
    assert not emulator.report().warnings


@pytest.mark.emulator
@HEAD_DIMS
@pytest.mark.parametrize("kind", [Batch, Fp8Batch])
def test_order_of_pages_does_not_matter(kind: type[Batch], head_dim: int) -> None:
    data = kind(Q_LENS, KV_LENS, heads=2, kv_heads=1, device="cpu", head_dim=head_dim, v_head_dim=head_dim)
    *pools, table = data.pages(16, order=1)
    key, value = map(to_e4m3, pools) if kind is Fp8Batch else pools
    with emulator.use("sm_100a", schedule="random"):
        same(as_problem(data), key=key, value=value, page_table=PageTable(table, table))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        (context_entry.test_separate_page_ids, (16, "NHD")),
        (context_entry.test_strides_of_query_and_output, ()),
        (fmha_v2_entry.test_layouts, (dict(mask_mode="causal"), CAUSAL)),
        (cudnn_entry.test_log_sum_exp, (False, True)),
        (cudnn_entry.test_log_sum_exp, (True, False)),
        (cudnn_entry.test_padding_of_the_log_sum_exp, (torch.int64,)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_entries(test: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """The entries' tests for other architectures also hold: caches, strides, statistics, log-sum-exp."""
    with emulator.use("sm_100a"):
        test(*arguments, "cpu")


@pytest.mark.slow_emulator
@pytest.mark.parametrize(("config", "page_size"), [*cases(REST)])
def test_other_configs(config: PrefillConfig, page_size: int | None) -> None:
    seed = REST.index(config)
    for schedule in ("eager", ADVERSE[seed % len(ADVERSE)]):
        check(config, page_size, heads=2, kv_heads=1, schedule=schedule, seed=seed)
