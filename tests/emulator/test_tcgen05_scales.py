"""tcgen05.mma with block scales: formats, vector sizes, scale-factor bytes, CTA pairs.

d[m][n] = sum over k of a[m][k] sa[m][k / v] b[n][k] sb[n][k / v], all of it exact in float32. Operand bytes, scale
factors and the result are placed by hand. Sources: PTX ISA, "tcgen05 block scaling" and "scale factor layout"; CUTLASS,
mma_sm100_desc.hpp (InstrDescriptorBlockScaled) and mma_traits_sm100_frag.hpp (tmem_sf_frg).
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
    noise,
    packed,
    place_result,
    place_rows,
    run_tmem,
)

from hopwell.emulator import EmulatorError, Unsupported

MX_CODE = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
# Kind and vector qualifier -> elements of k, scales of a row, format of the scales.
KINDS = {
    "mxf8f6f4.block_scale.scale_vec::1X": (32, 1, "ue8m0"),
    "mxf8f6f4.block_scale": (32, 1, "ue8m0"),
    "mxf8f6f4.block_scale.block32": (32, 1, "ue8m0"),
    "mxf4.block_scale.scale_vec::2X": (64, 2, "ue8m0"),
    "mxf4.block_scale.block32": (64, 2, "ue8m0"),
    "mxf4nvf4.block_scale.scale_vec::2X": (64, 2, "ue8m0"),
    "mxf4nvf4.block_scale.scale_vec::4X": (64, 4, "ue4m3"),
    "mxf4nvf4.block_scale.block16": (64, 4, "ue4m3"),
}


class Problem:
    """One product with random codes, and the place of each operand."""

    def __init__(self, kind, m, n, ctas=1, a="e2m1", b="e2m1", ids=(0, 0), scale=None, negate=False, in_tmem=False):
        self.kind, self.m, self.n, self.ctas, self.ids, self.negate = kind, m, n, ctas, ids, negate
        self.in_tmem, self.tight = in_tmem, not kind.startswith("mxf8f6f4")
        self.k, self.scales, default = KINDS[kind]
        self.scale = scale or default
        self.a_kind, self.b_kind = a, b
        self.a = draw(a, (m, self.k), 0.5, 2, 0)
        self.b = draw(b, (n, self.k), 0.5, 2, 1)
        self.sa = draw(self.scale, (m, self.scales), 0.5, 2, 2)
        self.sb = draw(self.scale, (n, self.scales), 0.5, 2, 3)
        self.at_a, self.at_b, self.at_values = n, n + 8, n + 16
        self.columns = -(-(n + 24) // 16) * 16

    def instruction_descriptor(self) -> int:
        a, b = (1, 1) if self.tight else (MX_CODE[self.a_kind], MX_CODE[self.b_kind])
        return (
            self.ids[1] << 4 | a << 7 | b << 10 | self.negate << 13 | self.n >> 3 << 17
            | (self.scale == "ue8m0") << 23 | self.m >> 4 << 24 | self.ids[0] << 29
        )  # fmt: skip

    def images(self) -> list[np.ndarray]:
        """Put A after B in each CTA's shared memory."""
        own_m, own_n = self.m // self.ctas, self.n // self.ctas
        out = []
        for cta in range(self.ctas):
            b = packed(self.b[own_n * cta : own_n * cta + own_n], self.b_kind, self.tight)
            a = packed(self.a[own_m * cta : own_m * cta + own_m], self.a_kind, self.tight)
            out.append(np.concatenate([k_major(b, 128, 256, size=32 * own_n), k_major(a, 128, 256, size=32 * own_m)]))
        return out

    def scale_words(self, tmem: np.ndarray, column: int, scales: np.ndarray, first_byte: int, halves: int) -> None:
        """Put row r of a half in lane r % 32 of each of its quarters, column r / 32, bytes from ``first_byte``."""
        per_half = len(scales) // halves
        raw = tmem.view(np.uint8).reshape(LANES, -1, 4)
        for h in range(halves):
            for q in range(4 // halves):
                for r in range(per_half):
                    lane = 128 // halves * h + 32 * q + r % 32
                    for k, scale in enumerate(scales[per_half * h + r], first_byte):
                        raw[lane, column + r // 32 + k // 4 * self.word(per_half), k % 4] = scale

    def word(self, rows: int) -> int:
        """Return how many columns behind a row's first four bytes of scales the next four are."""
        return 4 * -(-rows // 128)

    def before(self) -> np.ndarray:
        tmem = noise(self.ctas, LANES, self.columns)
        tmem[:, :, self.at_a : self.at_values] = np.tile(tmem[:, :32, self.at_a : self.at_values], (1, 4, 1))
        own = self.m // self.ctas
        for cta in range(self.ctas):
            self.scale_words(tmem[cta], self.at_a, self.sa[own * cta : own * cta + own], self.ids[0], 1)
            self.scale_words(tmem[cta], self.at_b, self.sb, self.ids[1], 2 if own == 64 else 1)
        if self.in_tmem:
            # PTX ISA, "packing formats of elements in tensor memory". The mxf4 kinds pack tightly. Other kinds have a
            # byte for each element, with a 4-bit element in bits 2 to 5.
            bytes_ = packed(self.a, "e2m1", True) if self.tight else self.a << 2 if self.a_kind == "e2m1" else self.a
            place_rows(np.ascontiguousarray(bytes_).view(np.uint32), self.m, self.ctas, tmem, self.at_values)
        return tmem

    def instruction(self) -> str:
        a = "[%r115]" if self.in_tmem else "%d1"
        return (
            descriptor("%d1", 32 * self.n // self.ctas, 128, 256) + descriptor("%d2", 0, 128, 256)
            + address("%r110", 0) + address("%r111", self.at_a) + address("%r112", self.at_b)
            + address("%r115", self.at_values)
            + f"mov.b32 %r113, {self.instruction_descriptor():#x}; setp.ne.u32 %p4, %r113, %r113;\n"
            f"tcgen05.mma.cta_group::{self.ctas}.kind::{self.kind} [%r110], {a}, %d2, %r113, [%r111], [%r112], %p4;\n"
        )  # fmt: skip

    def product(self) -> np.ndarray:
        per = self.k // self.scales
        a = VALUES[self.a_kind][self.a] * np.repeat(VALUES[self.scale][self.sa], per, axis=1)
        b = VALUES[self.b_kind][self.b] * np.repeat(VALUES[self.scale][self.sb], per, axis=1)
        d = (-a if self.negate else a) @ b.T
        assert (d.astype(np.float32) == d).all()
        return d.astype(np.float32)

    def check(self, **settings) -> None:
        before = self.before()
        after = run_tmem(self.instruction(), before, self.images(), self.ctas == 2, **settings)
        wanted = before.copy()
        place_result(self.product(), self.ctas, wanted)
        np.testing.assert_array_equal(after, wanted)


@pytest.mark.parametrize(
    ("m", "n", "ctas"), [(128, 64, 1), (128, 64, 2), (256, 64, 2)], ids=["one", "pair", "wide pair"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_vector_sizes(kind, m, n, ctas):
    """M = 128 of a pair splits D's columns, with their scales of B, over the halves of the lanes."""
    formats = {"a": "e4m3", "b": "e4m3"} if kind.startswith("mxf8") else {}
    Problem(kind, m, n, ctas, **formats).check()


@pytest.mark.parametrize(("m", "ctas"), [(128, 1), (128, 2), (256, 2)], ids=["one", "pair", "wide pair"])
@pytest.mark.parametrize(
    ("kind", "a"),
    [
        *(("mxf8f6f4.block_scale.scale_vec::1X", a) for a in MX_CODE),
        ("mxf4.block_scale.scale_vec::2X", "e2m1"),
        ("mxf4nvf4.block_scale.scale_vec::4X", "e2m1"),
    ],
)
def test_a_in_tensor_memory(kind, a, m, ctas):
    Problem(kind, m, 64, ctas, a=a, b="e4m3" if kind.startswith("mxf8") else "e2m1", in_tmem=True).check()


@pytest.mark.parametrize("n", [8, 96, 256])
def test_widths(n):
    """The scales cover row counts that do not fill a column, and several columns."""
    Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, n, a="e4m3", b="e4m3").check()


@pytest.mark.parametrize("a", MX_CODE)
@pytest.mark.parametrize("b", ["e4m3", "e3m2"])
def test_mixed_formats(a, b):
    Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, 32, a=a, b=b).check()


@pytest.mark.parametrize("ids", [(0, 3), (1, 2), (3, 0)])
def test_scale_ids_select_a_byte(ids):
    """Four steps of k share a column of scales: scale_vec::1X takes any byte."""
    Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, 64, a="e5m2", b="e2m3", ids=ids).check()


@pytest.mark.parametrize("ids", [(0, 2), (2, 0), (2, 2)])
def test_scale_ids_select_a_half_word(ids):
    Problem("mxf4.block_scale.scale_vec::2X", 128, 64, ids=ids).check()


def test_scale_format_is_a_bit_of_the_descriptor():
    Problem("mxf4nvf4.block_scale.scale_vec::4X", 128, 64, scale="ue8m0").check()


def test_negated_operand():
    Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, 64, a="e4m3", b="e4m3", negate=True).check()


def test_scales_through_a_copy():
    """As in CUTLASS, 32x128b.warpx4 copies 128 scales to all quarters, then the same thread multiplies."""
    problem = Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, 64, a="e4m3", b="e4m3")
    before = problem.before()
    wanted = before.copy()
    place_result(problem.product(), 1, wanted)
    before[:, :, problem.at_a : problem.at_a + 4] = noise(1, LANES, 4, seed=9)
    cells = np.ascontiguousarray(wanted[0, :32, problem.at_a : problem.at_a + 4]).view(np.uint8)
    image = problem.images()[0]
    copy = (
        descriptor("%d3", len(image), 128, 128) + address("%r114", problem.at_a)
        + "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r114], %d3;\n"
    )  # fmt: skip
    images = [np.concatenate([image, k_major(cells, 128, 128)])]
    for schedule in ("eager", "late"):
        after = run_tmem(copy + problem.instruction(), before, images, schedule=schedule)
        np.testing.assert_array_equal(after, wanted)


def test_every_quarter_needs_the_scales():
    problem = Problem("mxf8f6f4.block_scale.scale_vec::1X", 128, 64, a="e4m3", b="e4m3")
    before = problem.before()
    before[0, 100, problem.at_a] ^= 0x1
    with pytest.raises(EmulatorError, match="differ between the 32-lane quarters"):
        run_tmem(problem.instruction(), before, problem.images())


def test_block_scales_need_128_rows():
    """CUTLASS, mma_sm100_umma.hpp: SM100_MMA_MXF8F6F4_SS and SM100_MMA_MXF4_SS take M = 128, their pairs 128 or 256."""
    problem = Problem("mxf8f6f4.block_scale.scale_vec::1X", 64, 64, a="e4m3", b="e4m3")
    with pytest.raises(EmulatorError, match="M = 64"):
        run_tmem(problem.instruction(), problem.before(), problem.images())


# ------------------------------------------------------------------ K = 96
class LongProblem(Problem):
    """K = 96 on sm_103a: rows of 48 bytes from chunk ``start`` of 128-byte rows, which go on in a second buffer.

    PTX ISA, "absolute address mode for K dimension being 48B"; CUTLASS, mma_traits_sm100.hpp (SM103) and its example
    sm103_dense_blockscaled_gemm_persistent.py.
    """

    def __init__(self, kind: str, n: int, ctas: int, start: int, ids: tuple[int, int]):
        _, scales, _ = KINDS[kind]
        super().__init__(kind, 128 * ctas, n, ctas, ids=ids)
        self.k, self.scales, self.start = 96, scales * 3 // 2, start
        self.a, self.b = (draw("e2m1", (rows, 96), 0.5, 2, seed) for seed, rows in enumerate((self.m, n)))
        self.sa, self.sb = (draw(self.scale, (rows, self.scales), 0.5, 2, 2 + rows) for rows in (self.m, n))
        self.at_b, self.at_values = n + 16, n + 48
        self.columns = n + 48

    def buffers(self, codes: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(codes), 256), np.uint8)
        rows[:, 16 * self.start : 16 * self.start + 48] = packed(codes, "e2m1", True)
        return np.concatenate([k_major(half, 16, 1024, 128, size=128 * len(codes)) for half in np.split(rows, 2, 1)])

    def images(self) -> list[np.ndarray]:
        own_n = self.n // self.ctas
        return [
            np.concatenate(
                [self.buffers(self.b[own_n * c : own_n * c + own_n]), self.buffers(self.a[128 * c : 128 * c + 128])]
            )
            for c in range(self.ctas)
        ]

    def instruction_descriptor(self) -> int:
        return super().instruction_descriptor() | 1 << 31

    def descriptor(self, register: str, offset: int, rows: int) -> str:
        """Return instructions for a descriptor whose leading byte offset is the address of the second buffer."""
        return (
            descriptor(register, offset + 16 * self.start, 0, 1024, 128)
            + descriptor("%d5", offset + 128 * rows, 0, 0, 128)
            + f"and.b64 %d5, %d5, 0x3fff; shl.b64 %d5, %d5, 16; or.b64 {register}, {register}, %d5;\n"
            f"or.b64 {register}, {register}, {1 << 52:#x};\n"
        )

    def instruction(self) -> str:
        own_n = self.n // self.ctas
        return (
            self.descriptor("%d1", 256 * own_n, 128) + self.descriptor("%d2", 0, own_n)
            + address("%r110", 0) + address("%r111", self.at_a) + address("%r112", self.at_b)
            + f"mov.b32 %r113, {self.instruction_descriptor():#x}; setp.ne.u32 %p4, %r113, %r113;\n"
            f"tcgen05.mma.cta_group::{self.ctas}.kind::{self.kind} [%r110], %d1, %d2, %r113, [%r111], [%r112], %p4;\n"
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("mxf4nvf4.block_scale.block16", (0, 2)),
        ("mxf4nvf4.block_scale.block16", (2, 0)),
        ("mxf4.block_scale.block32", (0, 1)),
        ("mxf4.block_scale.block32", (2, 3)),
    ],
)
@pytest.mark.parametrize(("n", "ctas", "start"), [(64, 1, 0), (64, 1, 6), (256, 2, 7), (128, 2, 3)])
def test_rows_of_48_bytes(kind, ids, n, ctas, start):
    """Scales go on in the next word of a row, which lies behind the words of all rows."""
    LongProblem(kind, n, ctas, start, ids).check(target="sm_103a")


@pytest.mark.parametrize("change", [{"m": 128, "ctas": 2}, {"in_tmem": True}])
def test_rows_of_48_bytes_that_hardware_lacks(change):
    problem = LongProblem("mxf4nvf4.block_scale.block16", 64, change.get("ctas", 1), 0, (0, 0))
    text = problem.instruction()
    if "in_tmem" in change:
        text = text.replace("[%r110], %d1", "[%r110], [%r111]")
    else:
        code = problem.instruction_descriptor()
        text = text.replace(f"{code:#x}", f"{code & ~(31 << 24) | 8 << 24:#x}")
    with pytest.raises((EmulatorError, Unsupported), match="K = 96"):
        run_tmem(text, problem.before(), problem.images(), problem.ctas == 2, target="sm_103a")


def test_rows_of_48_bytes_need_sm_103():
    with pytest.raises(Unsupported, match="sm_100a"):
        LongProblem("mxf4nvf4.block_scale.block16", 64, 1, 0, (0, 0)).check()


def test_a_descriptor_without_its_constant():
    """PTX ISA, "matrix descriptor format" of tcgen05: bits 46 to 48 are 1."""
    problem = Problem("mxf8f6f4.block_scale", 128, 64, a="e4m3", b="e4m3")
    text = problem.instruction().replace("tcgen05.mma", "xor.b64 %d2, %d2, 0x400000000000;\ntcgen05.mma")
    with pytest.raises(Unsupported, match="matrix descriptor"):
        run_tmem(text, problem.before(), problem.images())
