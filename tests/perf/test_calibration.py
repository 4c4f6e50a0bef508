"""Published rates, steps as descriptions, and the model beside published kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tabulate")

from helpers.covering.shipped import all_shipped

from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.problem import Family
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from hopwell.kernels.sm100.prefill.config import HALVES
from hopwell.perf import blackwell_plans, calibration
from hopwell.perf.blackwell_kernels import DEQUANT, NVFP4_BITS, Order, leaves, mla, pair_prefill, prefill
from hopwell.perf.blackwell_rates import (
    B200,
    B300,
    DENSE_BF16,
    MMA_INTERVALS,
    RATES,
    interpolated,
    mma_interval,
    operand_bytes,
)
from hopwell.perf.calibration import BANDS, DECODE, MLA, PREFILL, PUBLISHED, family_of, spread
from hopwell.perf.kernel_work import work
from hopwell.perf.loops import innermost
from hopwell.perf.model import cases, config_of, kernel_model, predict, softmax_times
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.sass import Timing, disassemble, issue_times, sass_loops
from hopwell.perf.steps import (
    CHAIN,
    ISSUE,
    LOAD_CHAIN,
    MEMORY,
    MMA,
    MUFU,
    OUTPUT_CHAIN,
    SHARED,
    UNITS,
    Arrival,
    Chain,
    Instructions,
    Mma,
    Rescale,
    Softmax,
    Step,
    StepTime,
    Traffic,
)


def test_every_published_kernel_is_within_the_band_of_its_family() -> None:
    for one in PUBLISHED:
        assert abs(one.speed - 1) <= BANDS[one.family], (one.kernel, one.case.name, one.speed)


def test_bands_are_no_wider_than_they_need_be_and_fits_do_not_confirm() -> None:
    """A family has published figures that no rate was chosen for, and its band is at most 0.12 wider than needed."""
    for family, band in BANDS.items():
        free = [one for one in PUBLISHED if one.family == family and not one.fitted]
        assert len(free) >= 2, family
        assert max(abs(speed - 1) for speed in spread(family)) >= band - 0.12, family


def test_a_rate_that_is_wrong_leaves_the_band() -> None:
    """Each family depends on its limiting rates: with others, a row of the family leaves its band."""
    chosen = {one.family: one for one in PUBLISHED if one.arch == "sm_100a" and one.speed >= 0.99}
    assert set(chosen) == set(BANDS)
    for family, wrong in (
        (calibration.MLA, replace(B200, shared_reach=1.15, hbm_bytes=1e13)),
        (calibration.DECODE, replace(B200, hbm_bytes=1.4 * B200.hbm_bytes)),
        (calibration.PREFILL, replace(B200, tensor_load_latency=0, mufu=32, shared_reach=1.0)),
    ):
        one = chosen[family]
        wrong_speed = one.speed * calibration.seconds(one.case, one.loop, B200)
        wrong_speed /= calibration.seconds(one.case, one.loop, wrong)
        assert wrong_speed - 1 > BANDS[family], family


def test_tables_have_all_rows() -> None:
    text = calibration.table()
    for one in PUBLISHED:
        assert one.kernel in text
        assert one.source in text
        assert one.family == family_of(one.case)


def test_points_are_interpolated() -> None:
    points = {64: 2.0, 128: 4.0, 256: 4.0}
    assert [interpolated(points, x) for x in (64, 96, 128, 192, 256, 512)] == [2.0, 3.0, 4.0, 4.0, 4.0, 4.0]


def test_intervals_are_the_published_ones() -> None:
    one = dict(pair=False, a_in_tensor_memory=False)
    assert mma_interval(128, 64, **one)[0] == 48.6
    assert mma_interval(128, 192, **one)[0] == pytest.approx(96.6)
    assert mma_interval(128, 8, **one)[0] == (128 + 8) * 32 / 128, "below N 64 the operands limit"
    assert mma_interval(128, 128, pair=True, a_in_tensor_memory=True) == (32.7, 170)
    with pytest.raises(ValueError, match="M 256"):
        mma_interval(256, 128, **one)
    published = mma_interval(256, 256, pair=True, a_in_tensor_memory=False)
    assert mma_interval(256, 256, pair=True, a_in_tensor_memory=True) == published, "an assumption"
    for row in MMA_INTERVALS:  # none is faster than the dense rate allows, nor than 128 bytes a cycle
        for n, cycles in row.cycles.items():
            rows = row.rows // (2 if row.pair else 1)
            assert 2 * rows * n * 16 / cycles <= 1.002 * B200.mma_flop
            supplied = operand_bytes(row.rows, n, pair=row.pair, a_in_tensor_memory=row.a_in_tensor_memory)
            assert supplied / cycles <= 1.002 * B200.shared_bytes


def test_an_architecture_is_a_row() -> None:
    assert list(RATES) == ["sm_100a", "sm_103a"]
    assert (B200.mufu, B300.mufu, B200.gpu, B300.gpu) == (16, 32, "B200", "B300")
    assert B200.clock * B200.sms * B200.mma_flop == DENSE_BF16
    assert B200.memory_bytes(1 << 20) == B200.memory_bytes(128 << 10) > B200.memory_bytes(32 << 10)
    assert B200.tma_load(16 << 10) == 530


def test_a_step_is_as_long_as_its_busiest_unit() -> None:
    step = StepTime({MMA: 5.0, MUFU: 7.0, CHAIN: 6.0})
    assert (step.limiter, step.cycles, step.next_limiter) == (MUFU, 7.0, (CHAIN, 6 / 7))


def test_operations_add_up_and_the_slowest_chain_limits() -> None:
    burst, other = Mma(8, 128, 128), Mma(8, 128, 128, a_in_tensor_memory=True, signals=False)
    chains = (
        Chain((burst, Instructions(cycles=1000), Arrival(), other)),
        Chain((burst, Instructions(cycles=9000)), in_flight=4),
    )
    step = Step(128, 1e6, (burst, other, Traffic(shared=1280, memory=64)), chains)
    time = step.time(B200)
    assert tuple(time.units) == UNITS
    assert time.units[MMA] == pytest.approx(8 * (64.6 + 64.5))
    assert time.units[SHARED] == pytest.approx((8 * (8192 + 4096) + 1280) / 128 / B200.shared_reach)
    assert time.units[MEMORY] == pytest.approx(64 / B200.memory_bytes(128 << 10))
    assert time.units[CHAIN] == pytest.approx(max(8 * 64.6 + 140 + 1000 + 50 + 8 * 64.5, (8 * 64.6 + 140 + 9000) / 4))
    assert step.rate(B200) == pytest.approx(1e6 / time.cycles * B200.clock * B200.sms)


def test_chains_count_by_name() -> None:
    chains = Chain((Instructions(cycles=100),)), Chain((Instructions(cycles=70),), name=OUTPUT_CHAIN)
    time = Step(128, 1.0, (), (*chains, Chain((Instructions(cycles=60),), name=OUTPUT_CHAIN))).time(B200)
    assert (time.units[CHAIN], time.units[OUTPUT_CHAIN], time.limiter) == (100, 70, CHAIN)


def test_a_rescale_takes_a_load_and_products_for_each_chunk() -> None:
    """A step in which few rows move pays for its share only."""
    narrow, wide, packed = Rescale(256, 32, always=True), Rescale(256, 128, always=True), Rescale(256, 128, True, True)
    for one, cycles in ((narrow, 8 * 135), (wide, 2 * 231), (packed, 2 * 167)):
        assert one.latency(B200) == pytest.approx(150 + cycles)
    assert Rescale(256, 32).latency(B200) == pytest.approx(150 + B200.rescaling * 8 * 135)
    busy, rare = wide.busy(B200), Rescale(256, 128).busy(B200)
    assert busy[ISSUE] == 2 * packed.busy(B200)[ISSUE] == 256
    assert rare[ISSUE] == pytest.approx(B200.rescaling * 256)


def test_e4m3_mla_waits_for_the_correction_of_each_step() -> None:
    """References of e4m3 move in every step, so the columns that a thread rescales at once decide."""
    by_32, by_128, bf16 = mla(8, rescaled_at_once=32), mla(8), mla(16, rescaled_at_once=32)
    assert by_32.time(B200).limiter == OUTPUT_CHAIN
    assert by_128.time(B200).limiter == bf16.time(B200).limiter == SHARED
    assert by_32.time(B200).units[OUTPUT_CHAIN] - by_128.time(B200).units[OUTPUT_CHAIN] > 500


def test_bytes_of_mla_on_a_pair() -> None:
    """K for Q K^T and A 73728 bytes each, V 65536, P twice 32768 and written 16384, loads 139264."""
    for resident, a in ((0.0, 73728), (2 / 3, 24576)):
        units = mla(16, resident).time(B200).units
        assert units[SHARED] == pytest.approx((73728 + a + 65536 + 32768 + 16384 + 139264) / 128 / 0.82)
        assert units[MEMORY] == pytest.approx(73728 / B200.memory_bytes(128 << 10))
    own = 64 * 256 * 2  # bytes of a CTA's own keys and columns of V, which K has already
    loaded, shared = (mla(16, in_place=order).time(B200).units[SHARED] for order in (None, Order.STEPS))
    assert loaded - shared == pytest.approx(own / 128 / 0.82)
    half, whole = mla(8).time(B200).units, mla(16).time(B200).units
    assert half[SHARED] == pytest.approx(whole[SHARED] / 2)
    assert mla(16, 2 / 3, packed_rows=True).time(B200).units[MEMORY] < whole[MEMORY]


def test_keys_in_the_place_of_values_wait_for_a_load() -> None:
    """S of a step, a quarter of P V and a load from memory follow each other, with two steps in shared memory."""
    chain = mla(16, 2 / 3, in_place=Order.STEPS).time(B200)
    assert chain.units[LOAD_CHAIN] == pytest.approx(36 * 32.7 + 4 * 64.7 + 170 + B200.memory_latency)
    assert chain.limiter == LOAD_CHAIN
    assert chain.cycles > mla(16, 2 / 3).time(B200).cycles, "worse than V of its own"
    boxes = mla(16, 2 / 3, in_place=Order.BOXES).time(B200)
    assert boxes.limiter == SHARED
    slow = replace(B200, hbm_bytes=0.9 * B200.hbm_bytes)
    assert mla(16, 2 / 3, in_place=Order.BOXES).time(slow).units[LOAD_CHAIN] > boxes.cycles
    assert mla(16, 2 / 3).time(B200).units[LOAD_CHAIN] == 0
    assert mla(8, 8 / 9, in_place=Order.STEPS).time(B200).units[LOAD_CHAIN] < 1000, "four steps fit"


def test_a_load_takes_the_bytes_in_flight_over_their_rate() -> None:
    """Little's law: 48 KiB in flight in each SM reach 6.5 of 7.26 TB/s, so each byte takes 1.12 us."""
    assert B200.memory_latency == pytest.approx(148 * (48 << 10) / 6.5e12 * B200.clock)


def test_decode_reads_its_cache_once() -> None:
    for bits, memory in ((16, 65536), (8, 32768), (4.5, 18432)):
        assert leaves((128, 128), 8, bits).time(B200).units[MEMORY] == pytest.approx(
            memory / B200.memory_bytes(1 << 20)
        )
    assert leaves((128, 128), 8).time(B200).limiter == MEMORY
    assert leaves((576, 512), 16, latent=True).flop == 2 * 16 * 128 * (576 + 512)


def test_narrow_caches_are_converted_into_tensor_memory() -> None:
    """K and V^T are operand A there, so shared memory has the narrow bytes twice, Q and P."""
    columns = 16  # N of M 128
    operands, p_bytes = 2 * 8 * columns * 32, 128 * columns * 2
    for bits, loaded in ((8, 32768), (NVFP4_BITS, 18432)):
        step = leaves((128, 128), 8, bits)
        assert step.time(B200).units[SHARED] == pytest.approx((2 * loaded + operands + p_bytes) / 128 / 0.82)
    assert leaves((128, 128), 8, 8).time(B200).limiter == MEMORY
    assert leaves((128, 128), 8, NVFP4_BITS).time(B200).limiter == ISSUE
    assert set(DEQUANT) == {8, NVFP4_BITS}


def test_tiles_of_64_keys_read_as_much_as_one_of_128() -> None:
    """Up to 32 rows two MMA of M 64 keep Hopper's fragments. N is then 8 for 8 rows."""
    units = leaves((128, 128), 8).time(B200).units
    assert units[MMA] == pytest.approx(32 * (64 + 8) * 32 / 128)
    assert units[SHARED] == pytest.approx((32 * (64 + 8) * 32 + 65536 + 128 * 8 * 2) / 128 / 0.82)
    half, whole = leaves((64, 64), 8).time(B200).units, leaves((256, 256), 8).time(B200).units
    assert (half[MMA], whole[MMA]) == pytest.approx((units[MMA] / 2, 2 * units[MMA]))


def test_a_pair_of_ctas_shares_a_work_tile() -> None:
    """256 query rows take both CTAs, and half of the SMs of a GPU then have work tiles of their own."""
    loop, rates = pair_prefill(256, 16), replace(B200, sms=4, launch=0)
    kernel = kernel_model(loop, rates)
    assert (kernel.ctas, kernel.mma) == (2, 2048)
    case = Prefill("two", "two heads", (256,), (1280,), 2, 2, 256, 256, causal=False)
    found = predict(case, kernel, rates)
    assert found.seconds == pytest.approx((10 * kernel.steady.cycles + kernel.per_work_tile) / rates.clock)
    assert (found.balance, found.visible) == pytest.approx((1.0, 1.0))
    assert found.tensor_cores == pytest.approx(2048 / kernel.steady.cycles)
    units = loop.steady.time(B200).units
    # Q is read for 64 of the keys, K and V of half the keys and columns are loaded and read, and factors of 128 rows.
    moved = 65536 + 2 * 32768 + 2 * 32768 + 1024
    assert units[SHARED] == pytest.approx(moved / 128 / 0.82)


def test_a_dequantized_cache_is_read_and_written_again() -> None:
    wide, narrow = (prefill((128, 128), 16, cache_bits=bits).steady for bits in (0, 8))
    before, after = wide.time(B200).units, narrow.time(B200).units
    assert after[SHARED] - before[SHARED] == pytest.approx(32768 * (2 + 2 * 1 - 2) / 128 / 0.82)
    assert after[ISSUE] > before[ISSUE] + 200
    assert wide.flop == narrow.flop
    to_e4m3 = prefill((128, 128), 8, cache_bits=NVFP4_BITS).steady.time(B200).units
    assert to_e4m3[SHARED] < after[SHARED]


def test_half_rows_shorten_the_chain_and_keep_the_work() -> None:
    whole, half = (prefill((128, 128), 8, half_rows=halves).steady for halves in (False, True))
    before, after = whole.time(B200).units, half.time(B200).units
    assert after[CHAIN] < 0.8 * before[CHAIN]
    assert (after[MMA], after[SHARED], after[MUFU]) == (before[MMA], before[SHARED], before[MUFU])
    assert whole.flop == half.flop == 4 * 256 * 128 * 128


def test_plans_have_a_row_for_each_kernel_and_a_limiter() -> None:
    for rates in RATES.values():
        found = list(blackwell_plans.plans(rates))
        assert len({(one.name, one.case.name) for one in found}) == len(found)
        assert {one.family for one in found} == {DECODE, MLA, PREFILL}
        for one in found:
            most = 7260 if one.family == DECODE else 2 * DENSE_BF16 / 1e12
            assert 0 < one.rate(rates) < most, one.name
            assert one.family == family_of(one.case) or one.name.endswith("rows"), one.name


def test_the_page_has_the_tables_of_this_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels" / "blackwell.md").read_text()
    again = "python -m hopwell.perf model --document docs/kernels/blackwell.md writes them again"
    for table in (calibration.table(), *map(blackwell_plans.table, RATES.values())):
        assert table in page, again


@pytest.mark.compile
@pytest.mark.parametrize("name", ["P1", "P6", "P7", "P1-fp8"])
def test_the_estimate_of_softmax_is_that_of_compiled_code(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    config = config_of(case, "sm_100a")
    assert config is not None
    found = softmax_times(work(config, artifact(config)).softmax.code, B200).late
    options = dict(sharers=HALVES, exchanges=True)
    estimate = Softmax(config.half_keys, 512, config.polynomial_eighths, 8 * config.q_bytes, **options).latency(B200)
    assert estimate == pytest.approx(found, rel=0.2)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_the_estimate_of_a_rescale_is_that_of_compiled_code(dtype: str) -> None:
    """From the wait for O to the arrival that releases it."""
    configs = [c for c in all_shipped("sm_100a", Family.MLA) if isinstance(c, Sm100MlaConfig)]
    config = next(one for one in configs if one.dtype == dtype and one.head_dim_v == 512 and not one.sparse)
    code = disassemble(artifact(config).cubin)
    (loop,) = innermost(sass_loops(code), lambda one: {"LDTM", "STTM"} <= {code[i].root for i in one.path})
    path = [code[i] for i in loop.path]
    times = issue_times(path, B200.timings, Timing(B200.other_latency))
    waits = [time for one, time in zip(path, times, strict=True) if one.root == "SYNCS"]
    found = waits[-1] - waits[-2]
    assert Rescale(256, config.rescaled_columns, always=True).latency(B200) == pytest.approx(found, rel=0.1)
