"""From scores to weights: score maps and the online softmax, against definitions.

Device arithmetic runs on the host in float64: the tests cover the algebra, not the rounding.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32
from helpers.host import arithmetic
from helpers.host.arithmetic import INF, Fragment, number

from hopwell.kernels.parts.rows import softmax as softmax_module
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import LN_2, MOST_BELOW, SLACK, OnlineSoftmax, TileSoftmax
from hopwell.kernels.problem import ScoreKind
from hopwell.kernels.sm100.prefill import softmax as packed_module
from hopwell.kernels.sm100.prefill.softmax import SLACK_BELOW, Fp8PackedSoftmax, PackedSoftmax, polynomial_powers

# The DSL warns about weights too small for float32, which are zero on the device.
pytestmark = [pytest.mark.traced, pytest.mark.filterwarnings("ignore::cutlass.base_dsl.common.DSLWarning")]

TILE, ROWS = 8, 2
CLOSE = dict(rel=1e-5, abs=1e-30)  # constants are float32


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic.use(monkeypatch, OnlineSoftmax, TileSoftmax, PackedSoftmax, Fp8PackedSoftmax, ScoreMap, softmax_module)
    monkeypatch.setattr(packed_module, "_add_exponent", add_exponent)


def add_exponent(power: float, integer: float) -> float:
    """Add to the bits of float32, in 32-bit integers."""
    one, other = (np.array(value, np.float32).view(np.int32) for value in (power, integer))
    with np.errstate(over="ignore"):
        return float((one + (other << 23)).view(np.float32))


def softmax(scale: float) -> OnlineSoftmax:
    state = OnlineSoftmax.create(scale, ROWS)
    state.reset()
    return state


def tile_softmax(scale: float) -> OnlineSoftmax:
    state = TileSoftmax.create(scale, ROWS)
    state.reset()
    return state


def packed_softmax(scale: float, polynomial_eighths: int = 3) -> PackedSoftmax:
    return PackedSoftmax(**vars(softmax(scale)), polynomial_eighths=polynomial_eighths)


def scores(*, tiles: int = 5, spread: float = 20.0, seed: int = 0) -> list[list[list[float]]]:
    """Draw tiles of rows of raw scores."""
    draw = random.Random(seed)
    return [[[draw.gauss(0, spread) for _ in range(TILE)] for _ in range(ROWS)] for _ in range(tiles)]


class Row:
    """A row's output, accumulated in the consumers' way: values are the numbers of the keys."""

    def __init__(self) -> None:
        self.output = 0.0

    def add(self, weights: list[float], rescale: float, first_key: int) -> None:
        self.output = self.output * rescale + sum(w * (first_key + i + 1) for i, w in enumerate(weights))


def run(state: OnlineSoftmax, tiles: list[list[list[float]]]) -> list[Row]:
    rows = [Row() for _ in range(ROWS)]
    for n, tile in enumerate(tiles):
        fragment = Fragment(tile)
        state.step(fragment)
        for r, row in enumerate(rows):
            assert all(0 <= weight <= 2**SLACK for weight in fragment.values[r]), "16-bit weights have a range"
            row.add(fragment.values[r], number(state.rescale[r]), n * TILE)
    return rows


def masked(tiles: list[list[list[float]]], keep: Any) -> list[list[list[float]]]:
    """-inf wherever ``keep(row, key)`` does not hold."""
    return [
        [[s if keep(r, n * TILE + i) else -INF for i, s in enumerate(row)] for r, row in enumerate(tile)]
        for n, tile in enumerate(tiles)
    ]


MASKS = {
    "all": lambda row, key: True,
    "late": lambda row, key: key >= 3 * TILE,  # the row sees no key of the first tiles
    "early": lambda row, key: key < TILE,
    "one": lambda row, key: key == 13,
    "one row": lambda row, key: row == 1,
    "none": lambda row, key: False,
}


class TestOnlineSoftmax:
    @pytest.mark.parametrize("kind", [softmax, packed_softmax, tile_softmax])
    @pytest.mark.parametrize("sink", [-INF, -3.0, 0.5, 40.0, 3000.0])
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("scale", [0.0, 1e-3, 0.11, 4.0])
    def test_against_the_definition(self, scale: float, mask: str, sink: float, kind: Any) -> None:
        tiles = masked(scores(), MASKS[mask])
        state = kind(scale)
        rows = run(state, tiles)
        # Packed exponentials are computed in float32, as multiples of the score rather than of its distance.
        close = CLOSE if kind is softmax else dict(rel=3e-5, abs=1e-30)
        for r, row in enumerate(rows):
            logits = [scale * s if s > -INF else -INF for tile in tiles for s in tile[r]]
            top = max([*logits, sink])
            factor, lse = (number(value) for value in state.finish(r, sink, 1))
            largest, total = number(state.largest[r]), number(state.sum_of_largest(r, 1))
            if top == -INF:
                assert (factor, lse) == (0.0, -INF)
            else:
                weights = [math.exp(x - top) for x in logits]
                both = sum(weights) + math.exp(sink - top)
                want = sum(w * (i + 1) for i, w in enumerate(weights)) / both
                assert row.output * factor == pytest.approx(want, **close)
                assert lse * math.log(2) == pytest.approx(top + math.log(both), **close)
            # Statistics do not include the sink.
            seen = [x for x in logits if x > -INF]
            assert largest == max(s for tile in tiles for s in tile[r])
            assert total == pytest.approx(sum(math.exp(x - max(seen)) for x in seen) if seen else 0.0, **close)

    def test_the_reference_stays_while_it_can(self) -> None:
        """Lazy rescale: most steps need no rescale of the output, and each row decides for itself."""
        step = SLACK * math.log(2) / 4  # natural logits
        state = softmax(1.0)
        state.step(Fragment([[0.0] * TILE, [0.0] * TILE]))
        moved = []
        for n in range(1, 10):
            state.step(Fragment([[n * step] * TILE, [-float(n)] * TILE]))
            moved.append(number(state.rescale[0]) != 1.0)
            assert number(state.rescale[1]) == 1.0
            assert number(state.largest[0]) == n * step
            assert number(state.largest[1]) == 0.0
        assert moved == [False, False, False, False, True, False, False, False, False]

    def test_the_first_keys_are_a_reference(self) -> None:
        """The first keys set the reference, however small: otherwise -inf plus any number would stay -inf."""
        for first in (-1e30, -500.0, 0.0, 1e30):
            state = softmax(1e-3)
            state.step(Fragment([[-INF] * TILE] * ROWS))
            state.step(Fragment([[first] * TILE] * ROWS))
            assert [number(value) for value in state.reference] == [first] * ROWS
            assert [number(value) for value in state.row_sum] == [TILE] * ROWS

    def test_maximum(self) -> None:
        """The maximum includes every column; several chains compare them."""
        state = softmax(1.0)
        for place in range(TILE):
            row = [float(-c) for c in range(TILE)]
            row[place] = 100.0
            fragment = Fragment([row, [-INF] * TILE])
            assert number(state.maximum(fragment, 0)) == 100.0
            assert number(state.maximum(fragment, 1)) == -INF

    @pytest.mark.parametrize("kind", [softmax, packed_softmax])
    def test_columns_in_parts(self, kind: Any) -> None:
        """Once the reference is chosen, exponentials of a row may be computed a part at a time."""
        (tile,) = scores(tiles=1, spread=3.0)
        whole, parted = kind(0.7), kind(0.7)
        at_once = Fragment(tile)
        whole.step(at_once)
        halves = [Fragment([row[begin : begin + 4] for row in tile]) for begin in (0, 4)]
        for r in range(ROWS):
            parted.choose_reference(r, max(tile[r]))
            for half in halves:
                parted.exponentials(half, r)
            # The second half begins with the first kind of exponential of any part.
            joined = [weight for half in halves for weight in half.values[r]]
            assert joined == pytest.approx(at_once.values[r], rel=1e-5)
            assert number(parted.row_sum[r]) == pytest.approx(sum(joined), rel=1e-6)
            assert number(whole.row_sum[r]) == pytest.approx(sum(at_once.values[r]), rel=1e-6)


class TestTileSoftmax:
    def test_every_tile_has_the_weights_that_fit(self) -> None:
        """A tile's largest weight is 2^8, whether the tile is above or below the largest score so far.

        A tile far below has no weight, and accumulated sums are not scaled down further for it.
        """
        state = tile_softmax(math.log(2))  # raw scores are exponents of 2
        below = MOST_BELOW + 3
        tops = [0.0, 5.0, -20.0, -MOST_BELOW + 5, -below, 4.0, 300.0, 300.0 - below]
        weights, references = [], []
        for top in tops:
            fragment = Fragment([[top - c for c in range(TILE)]] * ROWS)
            state.step(fragment)
            weights.append(math.log2(max(fragment.values[0])))
            references.append(number(state.reference[0]))
        most = [5.0] * 6 + [300.0] * 2  # so far
        wanted = [max(top, largest - MOST_BELOW) for top, largest in zip(tops, [0.0, *most[1:]], strict=True)]
        assert references == pytest.approx(wanted, abs=1e-4)
        assert weights == pytest.approx([8 + top - w for top, w in zip(tops, wanted, strict=True)], abs=1e-3)

    @pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-3, 1.0, 1e4])
    def test_tiles_that_a_row_does_not_see(self, scale: float) -> None:
        """Invisible tiles at the front, in the middle and at the end: weights are zero, and sums stay unchanged."""
        tiles = masked(scores(tiles=6), lambda row, key: key // TILE in (1, 4))
        state = tile_softmax(scale)
        for n, tile in enumerate(tiles):
            fragment = Fragment(tile)
            state.step(fragment)
            assert n in (1, 4) or not any(fragment.values[0])
            # Float32 has room for 2^127; values and the maximum number of keys take 2^40 of it.
            assert 0 <= number(state.row_sum[0]) <= TILE * len(tiles) * 2.0 ** (8 + MOST_BELOW + 1)
            assert 0 <= number(state.rescale[0]) <= 2.0 ** (MOST_BELOW + 1)
        assert number(state.sum_of_largest(0, 1)) >= 1.0 - 1e-5


class TestPolynomials:
    """2^x without the function unit."""

    @staticmethod
    def powers(exponents: Any) -> np.ndarray[Any, Any]:
        pairs = np.asarray(exponents, np.float32).astype(float).reshape(-1, 2)
        return np.array([polynomial_powers((Float32(low), Float32(high))) for low, high in pairs]).ravel()

    def test_error(self) -> None:
        exponents = np.random.default_rng(0).uniform(-126, 10, 4000).astype(np.float32)
        # The fraction is largest half-way between integers, where the polynomial has its largest error.
        halves = np.arange(-126, 10, dtype=np.float32) + np.float32(0.5)
        around = np.concatenate((halves, np.nextafter(halves, -INF), np.nextafter(halves, INF)))
        for tested in (exponents, around.astype(np.float32)):
            want = np.exp2(tested.astype(float))
            assert np.abs(self.powers(tested) / want - 1).max() <= 4e-6

    def test_integers_are_exact(self) -> None:
        """A row's largest score has the weight 1 if it is the reference, as from the function unit."""
        exponents = np.arange(-126, 10)
        assert (self.powers(exponents) == np.exp2(exponents.astype(float))).all()
        assert self.powers([0.0, -0.0]).tolist() == [1.0, 1.0]

    def test_nothing_below_the_least_exponent(self) -> None:
        assert self.powers([-INF, -127.0, -127.5, -128.0, -1e30, -150.0]).tolist() == [0.0] * 6

    def test_they_grow(self) -> None:
        """Polynomials are monotonic even at changes of the nearest integer."""
        powers = self.powers(np.linspace(-20, 10, 6000, dtype=np.float32))
        assert (np.diff(powers) > 0).all()

    def test_halves_of_a_pair_do_not_mix(self) -> None:
        exponents = [-3.3, 2.1, -INF, 0.25]
        alone = [self.powers([exponent, 1.0])[0] for exponent in exponents]
        assert self.powers(exponents).tolist() == alone

    @pytest.mark.parametrize("eighths", range(9))
    def test_as_many_as_asked_for(self, eighths: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row never has more exponentials of one kind in sequence than necessary."""
        monkeypatch.setattr(packed_module, "polynomial_powers", lambda exponents: "polynomial")
        state = packed_softmax(1.0, eighths)
        kinds = [state._powers((0.0, 0.0), pair) == "polynomial" for pair in range(16)]
        assert kinds[:8] == kinds[8:]
        assert sum(kinds[:8]) == eighths
        for kind, count in ((True, eighths), (False, 8 - eighths)):
            longest = max((len(list(run)) for is_it, run in itertools.groupby(kinds) if is_it is kind), default=0)
            assert count in (0, 8) or longest <= -(-count // (8 - count))


class TestPartials:
    """A row's keys in partials, each with its own softmax, give the same result as all keys at once."""

    @pytest.mark.parametrize("sink", [-INF, 0.5, 3000.0])
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("scale", [0.0, 0.11, 4.0])
    def test_combined(self, scale: float, mask: str, sink: float) -> None:
        tiles = masked(scores(), MASKS[mask])
        whole, parts = softmax(scale), [softmax(scale) for _ in tiles]
        rows = run(whole, tiles)
        outputs = [run(part, [tile]) for part, tile in zip(parts, tiles, strict=True)]
        for r, row in enumerate(rows):
            partials = [part.partial(r, 1) for part in parts]
            # A partial counts its keys from its own first one.
            values = [out[r].output + n * TILE * number(partials[n][1]) for n, out in enumerate(outputs)]
            # Padding of a fan-in group: a reference without weight, and a sum that must not count.
            references, sums = [*(number(p[0]) for p in partials), -INF], [*(p[1] for p in partials), 1.0]
            weights, reference, total = softmax_module.combined(references, sums)
            assert number(weights[-1]) == 0.0
            output = sum(number(w) * value for w, value in zip(weights, values, strict=False))
            factor, lse = (number(value) for value in softmax_module.normalised(reference, total, sink))
            want_factor, want_lse = (number(value) for value in whole.finish(r, sink, 1))
            assert output * factor == pytest.approx(row.output * want_factor, **CLOSE)
            assert lse == pytest.approx(want_lse, **CLOSE)

    @pytest.mark.parametrize("sink", [3.0e38, INF])
    @pytest.mark.parametrize("reference", [-INF, 0.0, 50.0])
    def test_a_huge_sink_takes_all_weight(self, reference: float, sink: float) -> None:
        """In base 2 it is beyond float32; the log-sum-exp in base e is the sink itself."""
        seen = 0.0 if reference == -INF else 3.0
        factor, lse = softmax_module.normalised(reference, seen, sink)
        assert number(factor) == 0.0
        assert number(softmax_module.log_sum_exp(lse, sink, 1)) == pytest.approx(sink)
        assert number(softmax_module.log_sum_exp(lse, sink, 0)) == INF

    @pytest.mark.parametrize(("seen", "sink"), [(math.nan, -INF), (math.nan, 2.0), (3.0, math.nan), (0.0, math.nan)])
    def test_nan_reaches_both_results(self, seen: float, sink: float) -> None:
        factor, lse = softmax_module.normalised(-INF if seen == 0.0 else 1.0, seen, sink)
        for natural in (0, 1):
            assert math.isnan(number(softmax_module.log_sum_exp(lse, sink, natural)))
        assert math.isnan(number(factor))

    def test_no_keys_at_all(self) -> None:
        weights, reference, total = softmax_module.combined([-INF, -INF], [0.0, 0.0])
        assert [number(weight) for weight in weights] == [0.0, 0.0]
        assert (number(reference), number(total)) == (-INF, 0.0)


def score_map(kind: ScoreKind, scale: float = 0.25, cap: float = 30.0, heads: int = 8) -> ScoreMap:
    return ScoreMap(kind, scale, cap, Int32(heads))


def paper_slopes(heads: int) -> list[float]:
    """Return slopes by the code of Press et al., "Train Short, Test Long"."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2 ** (-(2 ** -(math.log2(power) - 3)))
    slopes = [first ** (i + 1) for i in range(power)]
    return slopes if power == heads else slopes + paper_slopes(2 * power)[0::2][: heads - power]


class TestScores:
    def test_scaled_scores_cost_nothing(self) -> None:
        fragment = Fragment([[1.0, -2.0, -INF]])
        found = score_map(ScoreKind.SCALED)
        found.apply(fragment, 0.0, 64, (100, 108))
        assert fragment.values == [[1.0, -2.0, -INF]]
        assert number(found.softmax_scale) == 0.25
        assert number(found.slope(Int32(3))) == 0.0
        assert number(found.largest_logit(7.0, found.shift(0.0, Int32(5)))) == 7.0

    @pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
    def test_soft_cap(self, cap: float) -> None:
        raw = [0.0, 1e-3, -1.0, 10.0, -400.0, 1e4, -1e4]
        found = score_map(ScoreKind.SOFT_CAP, cap=cap)
        fragment = Fragment([raw, raw[::-1]])
        found.apply(fragment, 0.0, 64, (100, 108))
        for got, score in zip(fragment.values[0] + fragment.values[1], raw + raw[::-1], strict=True):
            want = cap * math.tanh(0.25 * score / cap)
            assert got * number(found.softmax_scale) == pytest.approx(want, rel=1e-4, abs=1e-5 * cap)
            largest = number(found.largest_logit(got, found.shift(0.0, Int32(5))))
            assert largest == pytest.approx(want, rel=1e-4, abs=1e-5 * cap)

    @pytest.mark.parametrize("place", [1e-9, 0.01, 0.0624, 0.1249, 0.1251, 1.0, 20.0])
    def test_a_large_soft_cap_keeps_small_logits(self, place: float) -> None:
        """The series is as accurate as float32 up to the switch to the exponential."""
        found, cap = score_map(ScoreKind.LARGE_SOFT_CAP, cap=2.0**40), 2.0**40
        fragment = Fragment([[4.0 * place * cap, -4.0 * place * cap]])
        found.apply(fragment, 0.0, 64, (100,))
        for got, sign in zip(fragment.values[0], (1, -1), strict=True):
            assert got == pytest.approx(sign * math.tanh(place), rel=2.0**-22)

    @pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 20, 64, 71])
    def test_alibi_slopes(self, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cute.arch, "clz", lambda value: Int32(32 - int(value).bit_length()))
        found = score_map(ScoreKind.ALIBI, heads=heads)
        slopes = [number(found.slope(Int32(head))) for head in range(heads)]
        assert slopes == pytest.approx(paper_slopes(heads), rel=1e-6)

    @pytest.mark.parametrize(("tile_start", "first_row"), [(0, 0), (0, -5), (128, 1000), (8192, 8195)])
    def test_alibi(self, tile_start: int, first_row: int) -> None:
        """Natural logits with the key's position as bias; statistics count positions from the request's first key."""
        found, slope, first_column = score_map(ScoreKind.ALIBI), 0.0625, 6
        raw = [[float(8 * r + c) for c in range(TILE)] for r in range(ROWS)]
        fragment = Fragment(raw, first_column)
        positions = [first_row, first_row + 3]  # rows of a lane need not be neighbours
        found.apply(fragment, slope, Int32(tile_start), [Int32(position) for position in positions])
        assert number(found.softmax_scale) == 1.0
        for r, c in itertools.product(range(ROWS), range(TILE)):
            position = positions[r]
            want = 0.25 * raw[r][c] + slope * (tile_start + first_column + c)
            got = found.largest_logit(fragment.values[r][c], found.shift(slope, Int32(position)))
            assert number(got) == pytest.approx(want)
            # The bias counts from the row's own key, so its rounding does not grow with the length.
            assert fragment.values[r][c] == pytest.approx(want - slope * position)

    def test_the_bias_is_not_capped(self) -> None:
        found, slope, raw = score_map(ScoreKind.CAPPED_ALIBI, cap=3.0), 0.5, [0.0, -1.0, 10.0, 400.0]
        fragment = Fragment([raw, raw])
        found.apply(fragment, slope, Int32(64), [Int32(70), Int32(78)])
        assert number(found.softmax_scale) == 1.0
        for c, score in enumerate(raw):
            want = 3.0 * math.tanh(0.25 * score / 3.0) + slope * (64 + c)
            got = found.largest_logit(fragment.values[0][c], found.shift(slope, Int32(70)))
            assert number(got) == pytest.approx(want, rel=1e-4)

    def test_there_are_no_other_kinds(self) -> None:
        known = {"SCALED", "SOFT_CAP", "LARGE_SOFT_CAP", "ALIBI", "CAPPED_ALIBI"}
        assert {kind.name for kind in ScoreKind} == known, "each is tested above"


class TestFp8PackedSoftmax:
    @staticmethod
    def references(*maxima: float) -> list[tuple[float, float]]:
        """Return the reference and the factor of O after each tile with these largest scores, at a scale of 1."""
        state, found = Fp8PackedSoftmax(**vars(softmax(1.0)), polynomial_eighths=2), []
        state.reset()
        for maximum in maxima:
            state.choose_reference(0, Float32(maximum))
            found.append((number(state.reference[0]), number(state.rescale[0])))
        return found

    def test_it_follows_larger_scores_and_far_lower_ones(self) -> None:
        unit = LN_2  # of a power of two
        far = -(SLACK_BELOW + 1) * unit
        found = self.references(0.0, -SLACK_BELOW * unit * 0.9, far, 5 * unit, -100 * unit)
        assert [reference / unit for reference, _ in found] == pytest.approx([0, 0, far / unit, 5, 5 - MOST_BELOW])
        assert [factor for _, factor in found[1:]] == pytest.approx([1.0, 2.0**3, 2.0**-8, 2.0**MOST_BELOW])

    def test_a_tile_that_the_row_does_not_see_changes_nothing(self) -> None:
        (_, _), (reference, factor), (seen, _) = self.references(3.0, -INF, 3.0)
        assert (reference, factor, seen) == (3.0, 1.0, 3.0)
        assert self.references(-INF, 2.0)[1][0] == 2.0
