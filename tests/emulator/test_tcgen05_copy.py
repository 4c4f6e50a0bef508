"""tcgen05.cp, shift, ld and st: every shape moves exactly the cells that the PTX ISA names.

Sources of the closed forms: PTX ISA, "tcgen05 data movement shape", "tcgen05.cp", "tcgen05.shift"; CUTLASS,
copy_traits_sm100.hpp and copy_sm100.hpp.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from helpers.device.tmem import LANES, address, descriptor, k_major, noise, run_tmem

from hopwell.emulator import EmulatorError, Hazard, MemoryFault, Unsupported

COLUMNS = 48
# Shape -> rows of the source and, for each of its 32-row groups, the first lanes that receive it.
SHAPES = {
    "128x256b": (128, 256, [(0,), (32,), (64,), (96,)]),
    "128x128b": (128, 128, [(0,), (32,), (64,), (96,)]),
    "64x128b.warpx2::02_13": (64, 128, [(0, 64), (32, 96)]),
    "64x128b.warpx2::01_23": (64, 128, [(0, 32), (64, 96)]),
    "32x128b.warpx4": (32, 128, [(0, 32, 64, 96)]),
}


def bytes_of(rows: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, k), dtype=np.uint8)


def words(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint32)


def copied(shape: str, before: np.ndarray, source: np.ndarray, column: int) -> np.ndarray:
    """Return one CTA's tensor memory after a copy of ``source`` (words, [row][column])."""
    wanted = before.copy()
    for group, firsts in enumerate(SHAPES[shape][2]):
        for first in firsts:
            wanted[first : first + 32, column : column + source.shape[1]] = source[32 * group : 32 * group + 32]
    return wanted


def copy(shape: str, column: int, lbo: int, sbo: int, width: int = 16, lane: int = 0, group: int = 1) -> str:
    return (
        descriptor("%d1", 0, lbo, sbo, width)
        + address("%r104", column, lane)
        + f"tcgen05.cp.cta_group::{group}.{shape} [%r104], %d1;\n"
    )


@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize("shape", SHAPES)
def test_copy_shapes(shape, pair):
    """Each CTA of a pair copies from its own shared into its own tensor memory."""
    rows, bits, _ = SHAPES[shape]
    ctas = 2 if pair else 1
    before = noise(ctas, LANES, COLUMNS)
    source = [bytes_of(rows, bits // 8, seed) for seed in range(ctas)]
    images = [k_major(s, 4096, 128) for s in source]
    after = run_tmem(copy(shape, 20, 4096, 128, group=ctas), before, images, pair)
    for cta in range(ctas):
        np.testing.assert_array_equal(after[cta], copied(shape, before[cta], words(source[cta]), 20))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_copy_from_a_swizzled_source(width):
    before, source = noise(1, LANES, COLUMNS), bytes_of(128, 32, width)
    image = k_major(source, 16, 8 * width, width)
    after = run_tmem(copy("128x256b", 8, 16, 8 * width, width), before, [image])
    np.testing.assert_array_equal(after[0], copied("128x256b", before[0], words(source), 8))


@pytest.mark.parametrize("lane", [0, 31])
def test_copy_4x256b_writes_one_lane_of_each_quarter(lane):
    """CUTLASS, copy_traits_sm100.hpp: rows are 32 lanes apart, so lane 31 refreshes the lane left by a shift."""
    before, source = noise(1, LANES, COLUMNS), bytes_of(4, 32, lane)
    after = run_tmem(copy("4x256b", 16, 128, 256, lane=lane), before, [k_major(source, 128, 256, size=512)])
    wanted = before[0].copy()
    wanted[lane::32, 16:24] = words(source)
    np.testing.assert_array_equal(after[0], wanted)


@pytest.mark.parametrize("shape", ["128x256b", "32x128b.warpx4"])
@pytest.mark.parametrize(("form", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_decompression_gives_every_element_a_byte(shape, form, bits, shift):
    """Sixteen elements and padding fill 16 bytes.

    In a byte of tensor memory, a 4-bit element has two zeros on both sides (0b00ABCD00, as in CUTLASS
    mma_traits_sm120.hpp). A 6-bit element has two zeros above it.
    """
    rows, width, _ = SHAPES[shape]
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (rows, width // 8), dtype=np.uint8)
    packed = np.full((rows, width // 128, 16), 0xEE, np.uint8)
    for r in range(rows):
        for chunk in range(width // 128):
            number = sum(int(x) << bits * k for k, x in enumerate(codes[r, 16 * chunk : 16 * chunk + 16]))
            packed[r, chunk, : 2 * bits] = np.frombuffer(number.to_bytes(2 * bits, "little"), np.uint8)
    before = noise(1, LANES, COLUMNS)
    image = k_major(packed.reshape(rows, -1), 4096, 128)
    after = run_tmem(copy(f"{shape}.b8x16.{form}", 4, 4096, 128), before, [image])
    np.testing.assert_array_equal(after[0], copied(shape, before[0], words(codes << shift), 4))


@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_shift_moves_32_bytes_of_31_lanes_down_by_one(pair):
    ctas = 2 if pair else 1
    before = noise(ctas, LANES, COLUMNS)
    after = run_tmem(address("%r104", 8, 64) + f"tcgen05.shift.cta_group::{ctas}.down [%r104];\n", before, pair=pair)
    wanted = before.copy()
    wanted[:, 64:95, 8:16] = before[:, 65:96, 8:16]
    np.testing.assert_array_equal(after, wanted)


def test_shift_needs_an_aligned_lane():
    with pytest.raises(MemoryFault, match="lane 40"):
        run_tmem(address("%r104", 8, 40) + "tcgen05.shift.cta_group::1.down [%r104];\n", noise(1, LANES, COLUMNS))


def test_shift_then_copy_refreshes_the_last_lane_in_order():
    """PTX ISA, "tcgen05 pipelined instructions": shift and cp.4x256b of one thread run in the order of issue."""
    before, source = noise(1, LANES, COLUMNS), bytes_of(4, 32, 3)
    shifts = "".join(address("%r104", 16, 32 * q) + "tcgen05.shift.cta_group::1.down [%r104];\n" for q in range(4))
    after = run_tmem(
        shifts + copy("4x256b", 16, 128, 256, lane=31), before, [k_major(source, 128, 256, size=512)], schedule="late"
    )
    wanted = before[0].copy()
    for q in range(4):
        wanted[32 * q : 32 * q + 31, 16:24] = before[0, 32 * q + 1 : 32 * q + 32, 16:24]
        wanted[32 * q + 31, 16:24] = words(source)[q]
    np.testing.assert_array_equal(after[0], wanted)


# ------------------------------------------------------------------ loads and stores
def cell(shape: str, t: int, r: int, split: int) -> tuple[int, int]:
    """Return the lane and column of register r of thread t."""
    return {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
        "16x128b": (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
        "16x256b": (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
        "16x32bx2": (t % 16, r + t // 16 * split),
    }[shape]


# Shape, repetitions, registers of a thread, first lane within the warp's 32.
TRANSFERS = [
    ("32x32b", 8, 8, 0), ("32x32b", 1, 1, 0), ("16x64b", 4, 4, 0), ("16x64b", 1, 1, 16), ("16x128b", 2, 4, 0),
    ("16x64b", 8, 8, 16), ("16x128b", 2, 4, 16), ("16x128b", 1, 2, 0), ("16x128b", 8, 16, 16), ("16x256b", 1, 4, 0),
    ("16x256b", 2, 8, 16), ("16x256b", 4, 16, 0), ("16x256b", 8, 32, 16), ("16x32bx2", 4, 4, 0), ("16x32bx2", 4, 4, 16),
]  # fmt: skip


def transfer(direction: str, shape: str, repeat: int, n: int, column: int, lane: int, split: int, suffix="") -> str:
    """Return a load into %r32.. or a store of these registers by each warp, in its own lanes."""
    registers = "{" + ", ".join(f"%r{32 + k}" for k in range(n)) + "}"
    half = f", {split}" if shape == "16x32bx2" else ""
    op = f"tcgen05.{direction}.sync.aligned.{shape}.x{repeat}{suffix}.b32"
    at = f"add.u32 %r110, %r106, {lane << 16 | column};\n"
    if direction == "ld":
        return at + f"{op} {registers}, [%r110]{half};\ntcgen05.wait::ld.sync.aligned;\n"
    return at + f"{op} [%r110]{half}, {registers};\ntcgen05.wait::st.sync.aligned;\n"


@pytest.mark.parametrize(("shape", "repeat", "n", "lane"), TRANSFERS)
def test_load_shapes(shape, repeat, n, lane):
    """A store of the loaded registers as lanes x registers shows the result of the load's shape."""
    before = noise(1, LANES, COLUMNS if n < 32 else 80)
    moved = transfer("ld", shape, repeat, n, 4, lane, 11) + transfer("st", "32x32b", n, n, 32, 0, 0)
    after = run_tmem("", before, everyone=moved)
    wanted = before[0].copy()
    for w in range(4):
        for t in range(32):
            for r in range(n):
                row, column = cell(shape, t, r, 11)
                wanted[32 * w + t, 32 + r] = before[0, 32 * w + lane + row, 4 + column]
    np.testing.assert_array_equal(after[0], wanted)


@pytest.mark.parametrize(("shape", "repeat", "n", "lane"), TRANSFERS)
def test_store_shapes(shape, repeat, n, lane):
    before = noise(1, LANES, COLUMNS if n < 32 else 80)
    moved = transfer("ld", "32x32b", n, n, 32, 0, 0) + transfer("st", shape, repeat, n, 4, lane, 11)
    after = run_tmem("", before, everyone=moved)
    wanted = before[0].copy()
    for w in range(4):
        for t in range(32):
            for r in range(n):
                row, column = cell(shape, t, r, 11)
                wanted[32 * w + lane + row, 4 + column] = before[0, 32 * w + t, 32 + r]
    np.testing.assert_array_equal(after[0], wanted)


def test_packed_transfers_take_the_lower_halves_of_two_columns():
    before = noise(1, LANES, COLUMNS)
    moved = transfer("ld", "32x32b", 4, 4, 4, 0, 0, ".pack::16b") + transfer("st", "32x32b", 4, 4, 16, 0, 0)
    moved += transfer("st", "32x32b", 4, 4, 24, 0, 0, ".unpack::16b")
    after = run_tmem("", before, everyone=moved)[0]
    low = before[0, :, 4:12] & 0xFFFF
    np.testing.assert_array_equal(after[:, 16:20], low[:, 0::2] | low[:, 1::2] << 16)
    np.testing.assert_array_equal(after[:, 24:32] & 0xFFFF, low)
    np.testing.assert_array_equal(after[:, :16], before[0, :, :16])


@pytest.mark.parametrize("wait", ["tcgen05.wait::st.sync.aligned;", ""], ids=["waits", "does not wait"])
def test_both_columns_of_a_packed_store_are_tracked(wait):
    moved = (
        "mov.b32 %r32, 7; add.u32 %r110, %r106, 4; add.u32 %r111, %r106, 5;"
        f"tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r110], {{%r32}}; {wait}"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r33}, [%r111]; tcgen05.wait::ld.sync.aligned;"
        "tcgen05.wait::st.sync.aligned;"
    )
    with nullcontext() if wait else pytest.raises(Hazard, match="read is not ordered after write"):
        run_tmem("", noise(1, LANES, COLUMNS), everyone=moved)


def reduced(rows: np.ndarray, op: str, kind: str) -> np.ndarray:
    """Return the minimum or maximum of each row as numpy has it; a NaN in float results is the canonical one."""
    if kind != "f32":
        return getattr(rows.view(np.int32 if kind == "s32" else np.uint32), op)(1).view(np.uint32)
    values = rows.view(np.float32)
    values = np.abs(values) if ".abs" in op else values
    ignoring = {"min": np.fmin, "max": np.fmax} if ".NaN" not in op else {"min": np.minimum, "max": np.maximum}
    result = ignoring[op[:3]].reduce(values, 1)
    minus, plus = (((values == 0) & (np.signbit(values) == sign)).any(1) for sign in (True, False))
    sign = minus if op[:3] == "min" else ~plus  # -0 < +0
    result = np.where(result == 0, np.where(sign, np.float32(-0.0), np.float32(0)), result)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))


@pytest.mark.parametrize("shape", ["32x32b", "16x32bx2"])
@pytest.mark.parametrize("n", [2, 8, 16])
@pytest.mark.parametrize(
    ("op", "kind"),
    [("min", "f32"), ("max", "f32"), ("max.abs", "f32"), ("min.NaN", "f32"), ("max.abs.NaN", "f32"), ("min", "u32"),
     ("max", "s32")],
)  # fmt: skip
def test_loads_that_reduce(shape, n, op, kind):
    """The registers keep what is loaded, and one more has the reduction over them."""
    before = noise(1, LANES, COLUMNS)
    floats = np.random.default_rng(n).normal(size=(LANES, COLUMNS)).astype(np.float32)
    before[0] = floats.view(np.uint32)
    before[0, 5, 4:COLUMNS] = 0x7FC01234  # rows of NaN, with a NaN, and of zeros
    before[0, 6, 5] = 0xFFC00001
    before[0, 7, 4:COLUMNS] = np.where(np.arange(COLUMNS - 4) % 2, 0, 1 << 31)
    registers = "{" + ", ".join(f"%r{32 + k}" for k in range(n)) + "}"
    split = ", 8" if shape == "16x32bx2" else ""
    load = f"add.u32 %r110, %r106, 4; tcgen05.ld.red.sync.aligned.{shape}.x{n}.{op}.{kind} {registers}, %r64, "
    load += f"[%r110]{split};"
    load += "tcgen05.wait::ld.sync.aligned; mov.b32 %r65, 0; add.u32 %r110, %r106, 30;"
    stores = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r110], {%r64, %r65}; tcgen05.wait::st.sync.aligned;"
    after = run_tmem("", before, everyone=load + stores + transfer("st", "32x32b", n, n, 32, 0, 0), target="sm_103a")[0]
    loaded = np.empty((LANES, n), np.uint32)
    for lane in range(LANES):
        t = lane % 32
        row, first = (t, 4) if shape == "32x32b" else (t % 16, 4 + t // 16 * 8)
        loaded[lane] = before[0, lane - t + row, first : first + n]
    np.testing.assert_array_equal(after[:, 32 : 32 + n], loaded)
    np.testing.assert_array_equal(after[:, 30], reduced(loaded, op, kind))


@pytest.mark.parametrize(("target", "form"), [("sm_100a", "32x32b.x2.max.f32"), ("sm_103a", "16x64b.x2.max.f32"),
                                              ("sm_103a", "32x32b.x2.max.abs.s32")])  # fmt: skip
def test_loads_that_cannot_reduce(target, form):
    load = f"tcgen05.ld.red.sync.aligned.{form} {{%r32, %r33}}, %r64, [%r106];"
    with pytest.raises(Unsupported, match=r"tcgen05\.ld\.red"):
        run_tmem("", noise(1, LANES, COLUMNS), everyone=load, target=target)


def test_a_warp_cannot_reach_the_lanes_of_another():
    with pytest.raises(MemoryFault, match="may only access"):
        run_tmem("", noise(1, LANES, COLUMNS), everyone=transfer("ld", "16x64b", 1, 1, 4, 32, 0))


@pytest.mark.parametrize("direction", ["ld", "st"])
def test_transfers_start_at_half_of_the_lanes_of_a_warp(direction):
    moved = "mov.b32 %r32, 0;" + transfer(direction, "16x64b", 1, 1, 4, 8, 0)
    with pytest.raises(MemoryFault, match="not a multiple of 16"):
        run_tmem("", noise(1, LANES, COLUMNS), everyone=moved)


@pytest.mark.parametrize("direction", ["ld", "st"])
def test_all_lanes_give_one_address(direction):
    """PTX ISA, "tcgen05.ld": all threads of the warp specify the same address."""
    first, _, rest = transfer(direction, "32x32b", 1, 1, 4, 0, 0).partition("\n")
    own = "mov.b32 %r32, 0; and.b32 %r111, %lane, 1; add.u32 %r110, %r110, %r111;"
    with pytest.raises(MemoryFault, match="different addresses"):
        run_tmem("", noise(1, LANES, COLUMNS), everyone=first + own + rest)


def test_only_one_thread_issues_a_copy():
    with pytest.raises(EmulatorError, match="single-thread"):
        run_tmem("", noise(1, LANES, COLUMNS), [np.zeros(512, np.uint8)], everyone=copy("4x256b", 16, 128, 256))
