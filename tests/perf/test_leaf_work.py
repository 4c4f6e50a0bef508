"""The model of compiled tcgen05 decode: its reading of machine code, and the chain of a leaf."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("tabulate")

from hopwell.perf import leaf_work
from hopwell.perf.blackwell_rates import B200
from hopwell.perf.decode_workloads import DECODE
from hopwell.perf.leaf_work import Leaf, compiled_leaves, config_of_decode, leaf
from hopwell.perf.sass import Sass
from hopwell.perf.steps import CHAIN, ISSUE, LOAD_CHAIN, MEMORY, MMA, SHARED, TENSOR_MEMORY, Mma

CASES = {case.name: case for case in DECODE}
PLAIN = 1 | 7 << 5 | 7 << 8  # control word: one cycle, no scoreboard

# A leaf: two loops over tiles that issue products, a mask, softmax, and a tree with a store to global memory.
LOOP = (
    ("IADD3", -1),
    ("UIADD3", -1),  # 1: tiles of S
    ("UTCHMMA gdesc", -1),
    ("BRA.U UP1, `(tiles)", 1),
    ("SYNCS.PHASECHK", -1),
    ("LDTM", -1),
    ("@P0 BRA `(unmasked)", 9),
    ("FSEL", -1),
    ("FSEL", -1),
    ("MUFU.EX2", -1),  # 9: unmasked
    ("UTCHMMA gdesc", -1),  # 10: tiles of O
    ("BRA.U UP1, `(tiles)", 10),
    ("SYNCS.PHASECHK", -1),
    ("LDTM", -1),
    ("@P0 BRA `(end)", 19),
    ("FFMA", -1),
    ("@P2 BRA `(waits)", 18),
    ("STG", -1),
    ("STS", -1),  # 18: waits
    ("@P1 BRA `(leaf)", 0),
    ("EXIT", -1),
)
CODE = [Sass(text, PLAIN, target) for text, target in LOOP]


def roots(part: list[Sass]) -> list[str]:
    return [one.root for one in part]


def test_the_parts_of_a_leaf() -> None:
    """Tiles are repeated; masks and stores of nodes in global memory are left out."""
    config = config_of_decode(CASES["D2"], "sm_100a")
    assert config.leaf_tiles == 2
    found = leaf(config, CODE)
    tile = ["UIADD3", "UTCHMMA", "BRA"]
    to_scores, to_output, to_node, tree = map(roots, found.parts)
    assert to_scores == ["IADD3", *tile, *tile]
    assert to_output == ["SYNCS", "LDTM", "BRA", "MUFU", *["UTCHMMA", "BRA"] * 2]
    assert to_node == ["SYNCS", "LDTM"]
    assert tree == ["BRA", "FFMA", "BRA", "STS", "BRA"]
    assert found.bursts == (Mma(16, 64, 8), Mma(16, 64, 8))
    assert (found.warpgroups, found.leaves_of_node) == (1, 1)


def test_scores_a_leaf_ahead_follow_the_products_of_the_output() -> None:
    """The leaf waits for S, and issues O and the next leaf's S before it waits for O."""
    order = [0, *range(4, 12), 1, 2, 3, *range(12, 21)]
    code = [Sass(CODE[i].text, PLAIN, order.index(CODE[i].target) if CODE[i].target >= 0 else -1) for i in order]
    found = leaf(config_of_decode(CASES["D2"], "sm_100a"), code)
    assert found.scores_ahead
    assert not leaf(config_of_decode(CASES["D2"], "sm_100a"), CODE).scores_ahead
    to_scores, to_output, to_node, _ = map(roots, found.parts)
    assert to_scores == ["UIADD3", "UTCHMMA", "BRA"] * 2
    assert to_output == ["IADD3", "SYNCS", "LDTM", "BRA", "MUFU", *["UTCHMMA", "BRA"] * 2]
    assert to_node == ["SYNCS", "LDTM"]


def test_products_have_the_rows_of_both_warpgroups() -> None:
    config = config_of_decode(CASES["D2-q8"], "sm_100a")
    found = leaf(config, CODE)
    assert found.bursts == (Mma(32, 64, 64), Mma(32, 64, 64))
    assert (found.warpgroups, found.leaves_of_node) == (2, 4)
    units = compiled_leaves(config, CODE).time(B200).units
    assert units[MMA] == pytest.approx(2 * 32 * (64 + 64) * 32 / 128, rel=0.02)
    operands, p_bytes = 2 * 32 * (64 + 64) * 32, 256 * 64 * 2
    assert units[SHARED] == pytest.approx((operands + 131072 + p_bytes) / 128 / B200.shared_reach)


def test_the_chain_of_a_leaf() -> None:
    """Each instruction takes a cycle here. Products take 18 cycles each, and their signal 140."""
    code = [Sass(f"{root} R1", PLAIN) for root in ("IADD3", "UTCHMMA", "FFMA", "FFMA")]
    one = Leaf((code, code, code, code), (Mma(4, 64, 8), Mma(4, 64, 8)), warpgroups=1, leaves_of_node=1)
    products = 4 * 18
    assert one.latency(B200) == pytest.approx(2 * (1 + products + 140) + 3 + 3)
    assert replace(one, leaves_of_node=4).latency(B200) == pytest.approx(2 * (1 + products + 140) + 3 + 3 / 4)
    assert replace(one, warpgroups=2).latency(B200) == one.latency(B200)
    assert replace(one, scores_ahead=True).latency(B200) == pytest.approx(1 + 2 * products + 140)
    assert one.busy(B200)[ISSUE] == 16


def test_one_buffer_of_operand_a_waits_for_the_products_before() -> None:
    """Two pairs of tiles of two products each. With one buffer the second one follows the first one's products and
    signal."""
    code = [Sass(f"{root} R1", PLAIN) for root in ("IADD3", "UTCHMMA", "IADD3", "UTCHMMA", "FFMA")]
    bursts = Mma(4, 64, 8, a_in_tensor_memory=True), Mma(4, 64, 8, a_in_tensor_memory=True)
    one = Leaf((code, code, code[:1], code[:1]), bursts, warpgroups=1, leaves_of_node=1, turns=2, buffers=2)
    tile, signal = 2 * 18, 116
    assert one.latency(B200) == pytest.approx(2 * (1 + 2 * tile + signal))
    assert replace(one, buffers=1).latency(B200) == pytest.approx(2 * (3 + tile + signal + tile + signal))


def test_narrow_caches_are_read_once_and_stored_to_tensor_memory() -> None:
    config = config_of_decode(CASES["D2-q4-fp8"], "sm_100a")
    assert (config.rows, config.consumer_warpgroups, config.leaf_tokens, config.ctas_per_sm) == (32, 2, 256, 1)
    units = compiled_leaves(config, CODE).time(B200).units
    operands, p_bytes = 2 * 16 * 32 * 32, 256 * 32 * 2
    assert units[SHARED] == pytest.approx((operands + 2 * 65536 + p_bytes) / 128 / B200.shared_reach)
    assert units[TENSOR_MEMORY] > 2 * 65536 / B200.tensor_store
    nvfp4 = compiled_leaves(config_of_decode(CASES["D2-nvfp4"], "sm_100a"), CODE)
    in_flight = 3 * (4 * 2 - 1) * 64 * 72  # three CTAs with four stages of 64 keys
    assert nvfp4.time(B200).units[MEMORY] == pytest.approx(2 * 256 * 72 / B200.memory_bytes(in_flight))


def test_products_of_dequantized_operands_have_pairs_of_blocks() -> None:
    """A leaf has two pairs of tiles. Each has one product of S for 128 keys, and of O for 128 columns of each tile."""
    tile = ["UIADD3", "UTCHMMA", "BRA"]
    for name, rows, buffers in (("D2-fp8", 8, 2), ("D2-q4-fp8", 32, 2), ("D2-nvfp4", 8, 2)):
        found = leaf(config_of_decode(CASES[name], "sm_100a"), CODE)
        to_scores, to_output, _, _ = map(roots, found.parts)
        assert to_scores == ["IADD3", *tile, *tile]
        assert to_output[-4:] == ["UTCHMMA", "BRA"] * 2
        product = Mma(16, 128, rows, a_in_tensor_memory=True)
        assert found.bursts == (product, product)
        assert (found.turns, found.buffers) == (2, buffers)


def test_unused_rows_of_a_tile_do_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over e4m3 16 rows have the tile of 32."""
    monkeypatch.setattr(leaf_work, "artifact", lambda config: SimpleNamespace(cubin=None))
    monkeypatch.setattr(leaf_work, "disassemble", lambda cubin: CODE)
    few, all_rows = (leaf_work.compiled_decode(CASES[name], "sm_100a") for name in ("D2-q2-fp8", "D2-q4-fp8"))
    assert few.flop * 2 == all_rows.flop


def test_a_leaf_reads_its_bytes_and_stages_are_loaded_ahead() -> None:
    """One leaf of head dim 256 is in flight, and two of head dim 128."""
    wide, narrow = (compiled_leaves(config_of_decode(CASES[name], "sm_100a"), CODE) for name in ("D2-d256", "D2"))
    assert (wide.keys, narrow.keys) == (128, 128)
    assert wide.time(B200).units[MEMORY] == pytest.approx(131072 / B200.memory_bytes(64 << 10))
    assert narrow.time(B200).units[MEMORY] == pytest.approx(65536 / B200.memory_bytes(96 << 10))
    assert wide.time(B200).units[LOAD_CHAIN] == pytest.approx(32 * 18 + 140 + B200.memory_latency)
    assert narrow.time(B200).units[LOAD_CHAIN] == pytest.approx((16 * 18 + 140 + B200.memory_latency) / 2)


def test_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="128 packed rows"):
        config_of_decode(replace(CASES["D2"], q_len=16), "sm_100a")


@pytest.mark.compile
@pytest.mark.parametrize(("name", "limit"), [("D2", MEMORY), ("D2-q8", MEMORY), ("D2-fp8", MEMORY)])
def test_compiled_leaves(name: str, limit: str) -> None:
    time = leaf_work.compiled_decode(CASES[name], "sm_100a").time(B200)
    assert time.limiter == limit
    assert 1500 < time.units[CHAIN] < 7000
