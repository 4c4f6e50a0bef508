"""tcgen05.mma: every N that decode uses, with K-major and MN-major operands of 16 and 8 bits; .ws; refused shapes.

Operands are placed by hand in the canonical layouts of CUTLASS, mma_traits_sm100.hpp. Supported shapes: PTX ISA,
"tcgen05 matrix shape". Sums are exact in float32.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.device.tmem import (
    LANES,
    VALUES,
    address,
    descriptor,
    draw,
    k_major,
    mn_major,
    noise,
    place_result,
    place_rows,
    place_split_result,
    run_tmem,
)

from hopwell.emulator import EmulatorError, MemoryFault, Unsupported

# Kind of the instruction, code of the format, bytes of an element.
FORMATS = {"f16": ("f16", 0, 2), "bf16": ("f16", 1, 2), "e4m3": ("f8f6f4", 0, 1), "e5m2": ("f8f6f4", 1, 1),
           "s8": ("i8", 1, 1)}  # fmt: skip
NS = (8, 16, 24, 32, 48, 64)
AT_A = 2 * sum(NS)
COLUMNS = AT_A + 32
STEPS = 2


def elements(kind: str, shape: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random values, and their bytes [row][k bytes]."""
    if kind in ("e4m3", "e5m2"):
        codes = draw(kind, shape, 0.5, 2, seed)
        return VALUES[kind][codes], codes
    values = np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)
    if kind == "s8":
        return values, values.astype(np.int8).view(np.uint8)
    stored = values.astype(np.float16) if kind == "f16" else (values.view(np.uint32) >> 16).astype(np.uint16)
    return values, stored.view(np.uint8)


class Operand:
    """``STEPS`` instructions of k in one image: ``at(step)`` describes the operand of one instruction."""

    def __init__(self, kind: str, rows: int, mn: bool, width: int, seed: int):
        self.size = FORMATS[kind][2]
        self.k, self.mn, self.width = STEPS * 32 // self.size, mn, width
        self.values, self.raw = elements(kind, (rows, self.k), seed)
        if mn:  # 16-byte columns of k, in swizzle atoms of ``width`` bytes of rows by 8 of k
            across, deep = (128 * self.k // 8, 128) if width == 16 else (width * self.k, 8 * width)
            self.lbo, self.sbo = (deep, across) if width == 16 else (across, deep)
            self.image = mn_major(self.raw, self.size, self.lbo, self.sbo, width)
        elif width == 16:
            self.lbo, self.sbo = 128, 128 * (32 * STEPS // 16)
            self.image = k_major(self.raw, self.lbo, self.sbo)
        else:
            self.lbo, self.sbo = 16, 8 * width
            self.image = np.concatenate(
                [k_major(x, 16, self.sbo, width) for x in np.split(self.raw, max(1, 32 * STEPS // width), 1)]
            )

    def at(self, step: int) -> int:
        """Return the offset of the first element of a step."""
        if self.mn:
            return step * (32 // self.size // 8) * (self.lbo if self.width == 16 else self.sbo)
        per_atom = self.width // 32 if self.width > 16 else STEPS
        return step % per_atom * (2 * self.lbo if self.width == 16 else 32) + step // per_atom * len(self.image) // 2


def idesc(kind: str, m: int, n: int, a_mn: bool = False, b_mn: bool = False, b_kind: str = "") -> int:
    result = 2 if kind == "s8" else 1
    codes = FORMATS[kind][1] << 7 | FORMATS[b_kind or kind][1] << 10
    return result << 4 | codes | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


def issue(kind: str, code: int, a: str, column: int, step: int, group: str = "cta_group::1") -> str:
    return (
        address("%r110", column) + f"mov.b32 %r113, {code:#x}; setp.ne.u32 %p4, {step}, 0;\n"
        f"tcgen05.mma.{group}.kind::{FORMATS[kind][0]} [%r110], {a}, %d2, %r113, %p4;\n"
    )


PAIRS = [("bf16", "bf16"), ("e4m3", "e4m3"), ("f16", "f16"), ("e5m2", "e4m3")]
A_FORMS = ["K", "MN", "tensor"]
WIDTHS = [(128, 128), (64, 32), (16, 16), (32, 64)]  # swizzles of A and B in bytes


@pytest.mark.parametrize("pair", range(len(PAIRS)), ids=["-".join(x) for x in PAIRS])
@pytest.mark.parametrize("form", range(len(A_FORMS)), ids=A_FORMS)
@pytest.mark.parametrize("m", [64, 128])
def test_every_n_of_both_majors(m, form, pair):
    """One kernel multiplies A by the first N rows of two Bs, K-major and MN-major, for every N."""
    (kind, b_kind), a_form = PAIRS[pair], A_FORMS[form]
    a_width, b_width = WIDTHS[(pair // 2 + form + m // 128) % len(WIDTHS)]
    a = Operand(kind, m, a_form == "MN", a_width, 1)
    bs = [Operand(b_kind, max(NS), mn, b_width, 2 + mn) for mn in (False, True)]
    image = np.concatenate([np.pad(x.image, (0, -len(x.image) % 1024)) for x in (a, *bs)])
    starts = np.cumsum([0] + [len(x.image) + -len(x.image) % 1024 for x in (a, *bs)])
    before = noise(1, LANES, COLUMNS)
    if a_form == "tensor":
        place_rows(np.ascontiguousarray(a.raw).view(np.uint32), m, 1, before, AT_A)
    wanted, text, column = before.copy(), "", 0
    for b, start in zip(bs, starts[1:], strict=False):
        for n in NS:
            if b.mn and b.size == 1 and n % 16:  # not supported
                continue
            for step in range(STEPS):
                text += descriptor("%d1", a.at(step), a.lbo, a.sbo, a_width)
                text += descriptor("%d2", int(start) + b.at(step), b.lbo, b.sbo, b_width)
                text += address("%r111", AT_A + 8 * step)
                source = "[%r111]" if a_form == "tensor" else "%d1"
                text += issue(kind, idesc(kind, m, n, a.mn, b.mn, b_kind), source, column, step)
            place_result((a.values @ b.values[:n].T).astype(np.float32), 1, wanted, column)
            column += n
    np.testing.assert_array_equal(run_tmem(text, before, [image]), wanted)


@pytest.mark.parametrize(("kind", "a_form"), [("bf16", "shared"), ("e4m3", "tensor"), ("s8", "shared")])
@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary_products(m, kind, a_form):
    """With .ws, M = 32 and 64 put four and two column ranges of D into groups of lanes, each with its copy of A."""
    n = 64
    a, b = Operand(kind, m, False, 64, 1), Operand(kind, n, False, 64, 2)
    start = len(a.image) + -len(a.image) % 1024
    image = np.concatenate([np.pad(a.image, (0, start - len(a.image))), b.image])
    before = noise(1, LANES, n + 16)
    if a_form == "tensor":
        before[0, :, n : n + 16] = np.tile(np.ascontiguousarray(a.raw).view(np.uint32), (128 // m, 1))
    text = ""
    for step in range(STEPS):
        text += descriptor("%d1", a.at(step), a.lbo, a.sbo, 64)
        text += descriptor("%d2", start + b.at(step), b.lbo, b.sbo, 64)
        text += address("%r111", n + 8 * step)
        source = "[%r111]" if a_form == "tensor" else "%d1"
        text += issue(kind, idesc(kind, m, n), source, 0, step, "ws.cta_group::1").replace(
            f"kind::{FORMATS[kind][0]}", f"kind::{FORMATS[kind][0]}.collector::b0::{'use' if step else 'fill'}"
        )
    wanted = before.copy()
    place_split_result((a.values @ b.values.T).astype(np.int32 if kind == "s8" else np.float32), wanted[0])
    np.testing.assert_array_equal(run_tmem(text, before, [image]), wanted)


def run_zeros(kind: str, code: int, group="cta_group::1", a="%d1", pair=False, lanes=(0, 0)) -> None:
    text = descriptor("%d1", 0, 128, 256) + descriptor("%d2", 0, 128, 256) + address("%r111", 16, lanes[1])
    text += issue(kind, code, a, lanes[0] << 16, 0, group)
    run_tmem(text, noise(2 if pair else 1, LANES, 256), [np.zeros(8192, np.uint8)] * 2, pair, strict=False, race=False)


@pytest.mark.parametrize(
    ("kind", "m", "n", "b_mn", "group"),
    [
        ("bf16", 128, 264, False, "cta_group::1"),
        ("bf16", 256, 64, False, "cta_group::1"),
        ("bf16", 256, 24, False, "cta_group::2"),
        ("e4m3", 128, 24, True, "cta_group::1"),
        ("e4m3", 128, 16, True, "cta_group::2"),
        ("s8", 128, 40, False, "cta_group::1"),
        ("s8", 256, 48, False, "cta_group::2"),
        ("bf16", 32, 64, False, "cta_group::1"),
        ("bf16", 32, 32, False, "ws.cta_group::1"),
        ("bf16", 256, 64, False, "ws.cta_group::1"),
    ],
)
def test_shapes_that_hardware_lacks(kind, m, n, b_mn, group):
    with pytest.raises(EmulatorError, match=f"M = {m}, N = {n}"):
        run_zeros(kind, idesc(kind, m, n, b_mn=b_mn), group, pair="::2" in group)


def test_operands_that_have_to_be_k_major():
    with pytest.raises(EmulatorError, match="A of bf16 in tensor memory"):
        run_zeros("bf16", idesc("bf16", 128, 16, a_mn=True), a="[%r111]")
    with pytest.raises(EmulatorError, match="A of e2m1"):
        run_zeros("e4m3", idesc("e4m3", 128, 16, a_mn=True) | 5 << 7)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bf16", -1 << 4, "bf16 into f16"),
        ("e4m3", 1 << 4, "e4m3 into s32"),
        ("s8", -1 << 4, "s8 into f32"),
        ("s8", 1 << 13, "negated"),
        ("s8", 1 << 6, "reserved bits"),
        ("bf16", 1 << 3, "reserved bits"),
        ("e4m3", 1 << 23, "reserved bits"),
        ("f16", 1 << 30, "reserved bits"),
    ],
)
def test_instruction_descriptors_that_hardware_lacks(kind, change, message):
    with pytest.raises((EmulatorError, Unsupported), match=message):
        run_zeros(kind, idesc(kind, 128, 16) + change)


def test_16_bit_accumulators_of_f16_and_8_bits():
    """D in float16 is one of the formats of these kinds: nothing is refused."""
    for kind in ("f16", "e4m3"):
        run_zeros(kind, idesc(kind, 128, 16) - (1 << 4))


def test_operand_a_in_columns_of_d():
    with pytest.raises(MemoryFault, match=r"columns 0\.\.23 .* columns 16\.\.23"):
        run_zeros("bf16", idesc("bf16", 128, 24), a="[%r111]")
    run_zeros("bf16", idesc("bf16", 128, 16), a="[%r111]")


@pytest.mark.parametrize(("m", "d", "a"), [(128, 16, 16), (64, 16, 0), (64, 32, 32)])
def test_lanes_at_which_operands_cannot_start(m, d, a):
    """PTX ISA, "data path layout organization": lane 0, or lane 16 with M = 64, the same for A and D."""
    with pytest.raises(MemoryFault, match=f"D at lane {d} and A at lane {a}"):
        run_zeros("bf16", idesc("bf16", m, 16), a="[%r111]", lanes=(d, a))


def test_64_rows_from_lane_16():
    a, b = Operand("bf16", 64, False, 16, 1), Operand("bf16", 16, False, 16, 2)
    before = noise(1, LANES, 48)
    text = "".join(
        descriptor("%d1", a.at(step), a.lbo, a.sbo) + descriptor("%d2", len(a.image) + b.at(step), b.lbo, b.sbo)
        + issue("bf16", idesc("bf16", 64, 16), "%d1", 16 << 16, step)
        for step in range(STEPS)
    )  # fmt: skip
    after = run_tmem(text, before, [np.concatenate([a.image, b.image])])
    wanted = before.copy()
    lanes = np.arange(64) // 16 * 32 + 16 + np.arange(64) % 16
    wanted[0, lanes, :16] = (a.values @ b.values.T).astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(after, wanted)


def test_a_mask_of_zero_columns_is_not_emulated():
    text = descriptor("%d1", 0, 128, 256) + descriptor("%d2", 0, 128, 256)
    text += issue("bf16", idesc("bf16", 64, 64), "%d1", 0, 0, "ws.cta_group::1").replace("%p4;\n", "%p4, %d1;\n", 1)
    with pytest.raises(Unsupported, match="zero-column mask"):
        run_tmem(text, noise(1, LANES, 64), [np.zeros(8192, np.uint8)])
