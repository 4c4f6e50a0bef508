"""mma.sync of every kind of sm_120, and its matrix loads, against sums that float32 represents exactly.

Fragments: PTX ISA, "matrix fragments for mma.m16n8k16", "mma.m16n8k32" and "mma.m16n8k64", which are one rule in bytes.
Scales: "block scaling for mma.sync", "scale_vec_size" and "byte-id and thread-id".
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.device.ptx import empty, run_ptx
from helpers.device.tmem import VALUES, draw

from hopwell.emulator import EmulatorError
from hopwell.emulator.tools import devices

TARGET = "sm_120a"
LANES = np.arange(32)
GROUP, PLACE = LANES // 4, LANES % 4
LOADS = "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; add.u64 %d5, %a1, %d3;\n"


def words_of_rows(rows: np.ndarray, registers: int, halves: int) -> np.ndarray:
    """Return the registers [register][lane] of an operand from the bytes of its rows.

    A's registers alternate between the rows of both ``halves``.
    """
    out = np.empty((registers, 32), np.uint32)
    for r in range(registers):
        row = GROUP + 8 * (r % halves)
        first = 4 * PLACE + 16 * (r // halves)
        out[r] = np.stack([rows[row, first + e] for e in range(4)], -1).copy().view(np.uint32)[:, 0]
    return out


def matrix_of(words: np.ndarray) -> np.ndarray:
    """Return D [16][8] from its registers."""
    out = np.empty((16, 8), np.float32)
    for r in range(4):
        out[GROUP + 8 * (r // 2), 2 * PLACE + r % 2] = words[r].view(np.float32)
    return out


def product(
    op: str,
    a: np.ndarray,
    b: np.ndarray,
    scales: np.ndarray | None = None,
    select: str = "",
    start: str = "3F800000",
    target: str = TARGET,
    numerics: str = "auto",
) -> np.ndarray:
    """Return D of one instruction with C = ``start`` (default 1), from the bytes of A's rows and of B's columns.

    ``scales`` are the registers of A's and B's scales, ``select`` the byte and thread of each.
    """
    source = [words_of_rows(a, 4, 2), words_of_rows(b, b.shape[1] // 16, 1)]
    n_b = len(source[1])
    source += [np.zeros((2, 32), np.uint32) if scales is None else scales]
    flat = torch.from_numpy(np.concatenate(source).astype(np.int64).astype(np.uint32).view(np.int32).reshape(-1))
    y = empty(128)
    body = LOADS + "".join(f"ld.global.b32 %r{k}, [%d4+{128 * k}];\n" for k in range(6 + n_b))
    body += "".join(f"mov.b32 %r{20 + k}, 0f{start};\n" for k in range(4))
    b_list = ", ".join(f"%r{4 + k}" for k in range(n_b))
    chosen = [f", %r{4 + n_b + k}, {{{pair}}}" for k, pair in enumerate(select.split(";"))] if select else []
    body += f"{op} {{%r10, %r11, %r12, %r13}}, {{%r0, %r1, %r2, %r3}}, {{{b_list}}}, {{%r20, %r21, %r22, %r23}}"
    body += "".join(chosen) + ";\n" + "".join(f"st.global.b32 [%d5+{128 * k}], %r{10 + k};\n" for k in range(4))
    run_ptx(body, flat, y, target=target, strict=True, numerics=numerics)
    return matrix_of(y.numpy().view(np.uint32).reshape(4, 32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_16_bit_products(kind: str) -> None:
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    a, b = (torch.randint(-8, 9, (n, 16)).to(dtype) for n in (16, 8))
    raw = [x.view(torch.uint8).reshape(len(x), 32).numpy() for x in (a, b)]
    got = product(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", *raw)
    np.testing.assert_array_equal(got, 1 + (a.double() @ b.double().T).numpy())


def in_bytes(codes: np.ndarray, kind: str) -> np.ndarray:
    """Return the elements of kind::f8f6f4, one to a byte; a 4-bit element is in the middle of its byte."""
    return codes << 2 if kind == "e2m1" else codes


@pytest.mark.parametrize(
    ("form", "a_kind", "b_kind"),
    [
        ("", "e4m3", "e4m3"),
        ("", "e4m3", "e5m2"),
        ("kind::f8f6f4.", "e4m3", "e4m3"),
        ("kind::f8f6f4.", "e4m3", "e2m1"),
        ("kind::f8f6f4.", "e2m1", "e4m3"),
    ],
)
def test_8_bit_products(form: str, a_kind: str, b_kind: str) -> None:
    a, b = draw(a_kind, (16, 32), 0.5, 4, 1), draw(b_kind, (8, 32), 0.5, 4, 2)
    op = f"mma.sync.aligned.m16n8k32.row.col.{form}f32.{a_kind}.{b_kind}.f32"
    got = product(op, in_bytes(a, a_kind), in_bytes(b, b_kind))
    np.testing.assert_array_equal(got, 1 + VALUES[a_kind][a] @ VALUES[b_kind][b].T)


@pytest.mark.parametrize("numerics", ["fast", "hardware"])
def test_8_bit_products_without_the_instruction(numerics: str) -> None:
    """On Hopper, ptxas sums products from zero in f16 instructions, and adds the sum to C with one rounding.

    There, 2^24 + 1.5 rounds up. sm_120 has the instruction, which adds C with the products and truncates.
    """
    one, half = (np.flatnonzero(VALUES["e4m3"] == x)[0] for x in (1, 0.5))
    a, b = np.zeros((16, 32), np.uint8), np.zeros((8, 32), np.uint8)
    a[:, [0, 3]], b[:, 0], b[:, 3] = one, one, half
    op = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
    start = f"{int(np.float32(2**24).view(np.uint32)):08X}"
    hopper, blackwell = (
        product(op, a, b, start=start, target=target, numerics=numerics) for target in ("sm_90a", "sm_120a")
    )
    assert (hopper == 2**24 + 2).all()
    assert (blackwell == 2**24).all()
    a, b = draw("e4m3", (16, 32), 0.5, 4, 1), draw("e4m3", (8, 32), 0.5, 4, 2)
    exact = 1 + VALUES["e4m3"][a] @ VALUES["e4m3"][b].T
    np.testing.assert_array_equal(product(op, a, b, target="sm_90a", numerics=numerics), exact)


def scale_registers(codes: np.ndarray, threads: int, thread: int, byte: int, seed: int) -> np.ndarray:
    """Return the register with ``codes`` [rows][scales] from ``byte`` on, and noise in all other places.

    Rows g and g + 8 of A are in the two lanes of a quad that ``thread`` names, columns of B in one lane.
    """
    lanes = np.random.default_rng(seed).integers(0, 256, (32, 4), np.uint8)
    for row, values in enumerate(codes):
        lane = 4 * (row % 8) + threads * thread + row // 8
        lanes[lane, byte : byte + len(values)] = values
    return lanes.view(np.uint32)[:, 0]


@pytest.mark.parametrize(("byte_a", "thread_a", "byte_b", "thread_b"), [(0, 0, 0, 0), (3, 1, 1, 2), (2, 0, 3, 3)])
@pytest.mark.parametrize(("a_kind", "b_kind"), [("e4m3", "e4m3"), ("e4m3", "e2m1"), ("e2m1", "e4m3")])
def test_mxf8f6f4_scales_rows_by_powers_of_two(a_kind, b_kind, byte_a, thread_a, byte_b, thread_b) -> None:
    a, b = draw(a_kind, (16, 32), 0.5, 4, 3), draw(b_kind, (8, 32), 0.5, 4, 4)
    sa, sb = draw("ue8m0", (16, 1), 0.5, 4, 5), draw("ue8m0", (8, 1), 0.5, 4, 6)
    registers = [scale_registers(sa, 2, thread_a, byte_a, 7), scale_registers(sb, 1, thread_b, byte_b, 8)]
    op = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
    op += f".f32.{a_kind}.{b_kind}.f32.ue8m0"
    select = f"{byte_a}, {thread_a};{byte_b}, {thread_b}"
    got = product(op, in_bytes(a, a_kind), in_bytes(b, b_kind), np.stack(registers), select)
    ue8m0 = VALUES["ue8m0"]
    np.testing.assert_array_equal(got, 1 + (VALUES[a_kind][a] * ue8m0[sa]) @ (VALUES[b_kind][b] * ue8m0[sb]).T)


@pytest.mark.parametrize("numerics", ["fast", "hardware"])
def test_small_scales_lose_nothing(numerics: str) -> None:
    """Products are aligned to the largest product after scaling, not to the largest number of the format."""
    a, b = draw("e4m3", (16, 32), 0.5, 4, 3), draw("e4m3", (8, 32), 0.5, 4, 4)
    registers = np.full((2, 32), 127 - 30, np.uint32)
    op = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
    got = product(op, a, b, registers, "0, 0;0, 0", start="00000000", numerics=numerics)
    np.testing.assert_array_equal(got, 2.0**-60 * (VALUES["e4m3"][a] @ VALUES["e4m3"][b].T))


def test_unit_scales_give_the_plain_product() -> None:
    a, b = draw("e4m3", (16, 32), 2**-9, 448, 1), draw("e4m3", (8, 32), 2**-9, 448, 2)
    plain = product("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", a, b)
    op = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
    scaled = product(op, a, b, np.full((2, 32), 0x7F, np.uint32), "0, 0;0, 0")
    np.testing.assert_array_equal(scaled, plain)


@pytest.mark.parametrize(("form", "scale", "per_row"), [("4X", "ue4m3", 4), ("2X", "ue8m0", 2)])
@pytest.mark.parametrize(("thread_a", "thread_b"), [(0, 0), (1, 2)])
def test_mxf4nvf4_scales_blocks(form: str, scale: str, per_row: int, thread_a: int, thread_b: int) -> None:
    a, b = draw("e2m1", (16, 64), 0.5, 4, 3), draw("e2m1", (8, 64), 0.5, 4, 4)
    sa, sb = draw(scale, (16, per_row), 0.5, 4, 5), draw(scale, (8, per_row), 0.5, 4, 6)
    byte = 4 - per_row
    registers = [scale_registers(sa, 2, thread_a, byte, 7), scale_registers(sb, 1, thread_b, byte, 8)]
    op = f"mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::{form}.f32.e2m1.e2m1.f32.{scale}"
    rows = [x[:, ::2] | x[:, 1::2] << 4 for x in (a, b)]
    got = product(op, *rows, np.stack(registers), f"{byte}, {thread_a};{byte}, {thread_b}")
    wide = [VALUES["e2m1"][x] * np.repeat(VALUES[scale][s], 64 // per_row, 1) for x, s in ((a, sa), (b, sb))]
    np.testing.assert_array_equal(got, 1 + wide[0] @ wide[1].T)


# ------------------------------------------------------------------ loads
def loaded(op: str, memory: np.ndarray, registers: int, expected_lanes: int, target: str = TARGET) -> np.ndarray:
    """Return registers [register][lane] after a matrix load of the rows ``memory`` [n][16 bytes].

    Lanes past the rows of the instruction have an address that would fault.
    """
    x, y = torch.from_numpy(memory.copy().view(np.int32).reshape(-1)), empty(32 * registers)
    body = LOADS + "mul.lo.u32 %r1, %tid, 16; mul.wide.u32 %d6, %tid, 16; add.u64 %d6, %d6, %a0;\n"
    body += f"mov.u32 %r2, smem; add.u32 %r3, %r2, %r1; setp.ge.u32 %p1, %tid, {expected_lanes}; @%p1 bra HERE;\n"
    body += "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d6]; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};\n"
    body += "HERE: bar.warp.sync -1; @%p1 mov.u32 %r3, 1;\n"
    names = [f"%r{10 + k}" for k in range(registers)]
    body += f"{op} {{{', '.join(names)}}}, [%r3];\n"
    body += "".join(f"st.global.b32 [%d5+{128 * k}], {name};\n" for k, name in enumerate(names))
    run_ptx(body, x, y, shared=512, target=target, strict=True, race=True)
    return y.numpy().view(np.uint32).reshape(registers, 32)


def noise(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, 16), np.uint8)


def as_bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_of_16_bit_elements(count: int, trans: bool) -> None:
    rows = noise(8 * count)
    op = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    got = loaded(op, rows, count, 8 * count)
    halves = rows.view(np.uint16).reshape(count, 8, 8)
    matrices = halves.transpose(0, 2, 1) if trans else halves
    want = np.stack([np.ascontiguousarray(m).reshape(32, 2).view(np.uint32)[:, 0] for m in matrices])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bits", [8, 4, 6])
def test_ldmatrix_transposes_bytes(count: int, bits: int) -> None:
    """Two registers come from a 16 x 16 matrix, each with eight of its columns as rows."""
    rows = noise(16 * count)
    source = {8: "b8", 4: "b8x16.b4x16_p64", 6: "b8x16.b6x16_p32"}[bits]
    op = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{source}"
    got = as_bytes(loaded(op, rows, 2 * count, 16 * count))
    elements = unpacked(rows, bits).reshape(count, 16, 16)
    for k in range(2 * count):
        for e in range(4):
            want = elements[k // 2][4 * PLACE + e, 8 * (k % 2) + GROUP]
            np.testing.assert_array_equal(got[k, :, e], want)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 6])
def test_ldmatrix_unpacks_to_bytes(count: int, bits: int) -> None:
    rows = noise(8 * count)
    source = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    got = as_bytes(loaded(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{source}", rows, count, 8 * count))
    elements = unpacked(rows, bits).reshape(count, 8, 16)
    for k in range(count):
        for e in range(4):
            np.testing.assert_array_equal(got[k, :, e], elements[k][GROUP, 4 * PLACE + e])


def unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Return the sixteen elements in the first bytes of each row."""
    numbers = [int.from_bytes(row.tobytes(), "little") for row in rows]
    return np.array([[n >> bits * k & (1 << bits) - 1 for k in range(16)] for n in numbers], np.uint8)


def test_byte_matrices_feed_the_product() -> None:
    """V [32 keys][16 columns] becomes two B operands: registers 0 and 2 of the transposing load, then 1 and 3."""
    v = draw("e4m3", (32, 16), 0.5, 4, 1)
    words = loaded("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8", v, 4, 32)
    for tile in range(2):
        np.testing.assert_array_equal(words[[tile, tile + 2]], words_of_rows(v.T[8 * tile : 8 * tile + 8], 2, 1))


@pytest.mark.parametrize(
    ("shape", "element", "trans"), [("m8n8", "b16", False), ("m8n8", "b16", True), ("m16n8", "b8", True)]
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(shape: str, element: str, trans: bool, count: int) -> None:
    """Registers go to rows of 16 bytes in shared memory; byte matrices exist only transposed."""
    words = np.random.default_rng(count).integers(0, 2**32, (count, 32), np.uint32)
    x, y = torch.from_numpy(words.view(np.int32).reshape(-1)), empty(32 * count)
    names = [f"%r{10 + k}" for k in range(count)]
    body = LOADS + "".join(f"ld.global.b32 {name}, [%d4+{128 * k}];\n" for k, name in enumerate(names))
    op = f"stmatrix.sync.aligned.{shape}.x{count}{'.trans' if trans else ''}.shared.{element}"
    body += f"mul.lo.u32 %r1, %tid, 16; mov.u32 %r2, smem; add.u32 %r3, %r2, %r1; {op} [%r3], {{{', '.join(names)}}};\n"
    body += "bar.warp.sync -1; mul.lo.u32 %r1, %tid, 4; add.u32 %r3, %r2, %r1;\n"
    body += "".join(f"ld.shared.b32 %r4, [%r3+{128 * k}]; st.global.b32 [%d5+{128 * k}], %r4;\n" for k in range(count))
    run_ptx(body, x, y, shared=512, target=TARGET, strict=True, race=True)
    got = y.numpy().view(np.uint8).reshape(count, 8, 16)
    for k in range(count):
        if element == "b16":
            halves = np.ascontiguousarray(words[k]).view(np.uint16).reshape(8, 8)
            np.testing.assert_array_equal(got[k].view(np.uint16), halves.T if trans else halves)
        else:
            for e in range(4):
                want = as_bytes(words[k])[:, e]
                np.testing.assert_array_equal(got[k][2 * PLACE + e % 2, GROUP + 8 * (e // 2)], want)


def test_matrix_loads_that_do_not_exist() -> None:
    with pytest.raises(EmulatorError, match="m16n16"):
        loaded("ldmatrix.sync.aligned.m16n16.x1.shared.b8", noise(16), 2, 16)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    "form", ["f8f6f4.f32.e4m3.e4m3.f32", "mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"]
)
def test_products_that_only_sm_120_has(form: str, target: str) -> None:
    a, b = draw("e4m3", (16, 32), 0.5, 4, 3), draw("e4m3", (8, 32), 0.5, 4, 4)
    op, scaled = f"mma.sync.aligned.m16n8k32.row.col.kind::{form}", "block_scale" in form
    with pytest.raises(EmulatorError, match=rf"kind::.* on {target}"):
        product(op, a, b, select="0, 0;0, 0" if scaled else "", target=target)


def test_block_scaled_products_of_4_bits_are_those_of_sm_120_alone() -> None:
    op = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    with pytest.raises(EmulatorError, match=r"mxf4nvf4.* on sm_90a"):
        product(op, np.zeros((16, 32), np.uint8), np.zeros((8, 32), np.uint8), select="0, 0;0, 0", target="sm_90a")


@pytest.mark.parametrize(
    "op",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8",
        "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64",
        "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b6x16_p32",
    ],
)
def test_hopper_has_no_matrix_loads_of_fewer_bits(op: str) -> None:
    with pytest.raises(EmulatorError, match="on sm_90a, which has matrices of 16 bits only"):
        loaded(op, noise(16), 2, 16, target="sm_90a")


# ------------------------------------------------------------------ rounding, against a GPU
CHAIN, TILES = 4, 256


def chain_text(kind: str) -> str:
    """Return a kernel with a chain of products, one warp for each block; its operands are words
    [block][register][lane].
    """
    each, depth = 6, 32 if kind == "e4m3" else 16
    op = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    row = CHAIN * each * 128
    body = "".join(
        f"mul.lo.u32 %r1, %block, {size}; mad.lo.u32 %r1, %thread, 4, %r1; cvt.u64.u32 %d{k}, %r1;\n"
        f"add.u64 %d{k}, %a{k}, %d{k};\n"
        for k, size in enumerate((row, 512))
    )
    body += "".join(f"ld.global.b32 %r{10 + k}, [%d0+{128 * k}];\n" for k in range(CHAIN * each))
    body += "".join(f"mov.b32 %r{2 + k}, 0;\n" for k in range(4))
    for step in range(CHAIN):
        first = 10 + each * step
        spans = ((2, 6), (first, first + 4), (first + 4, first + 6), (2, 6))
        groups = ["{" + ", ".join(f"%r{r}" for r in range(*span)) + "}" for span in spans]
        body += f"{op} {', '.join(groups)};\n"
    body += "".join(f"st.global.b32 [%d1+{128 * k}], %r{2 + k};\n" for k in range(4))
    return devices.module_text("sm_90a", devices.entry("k", "u64 u64", body))


def chains(kind: str, device: devices.Device) -> np.ndarray:
    """Return the bits of the sums of random operands."""
    generator = np.random.default_rng(3)
    count = TILES * CHAIN * 6 * 32
    if kind == "e4m3":
        codes = generator.integers(0, 256, 4 * count, np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        words = torch.from_numpy(codes.view(np.int32))
    else:
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
        words = torch.from_numpy(generator.standard_normal(2 * count)).to(dtype).view(torch.int32)
    operands = words.to(device.torch_device)
    out = torch.zeros(TILES * 128, dtype=torch.int32, device=device.torch_device)
    device.launch(chain_text(kind), TILES, 32, 0, [operands, out])
    return out.cpu().numpy()


@pytest.mark.parametrize("kind", ["f16", "bf16", "e4m3"])
def test_chains_are_near_float64(kind: str) -> None:
    """The emulator's hardware rounding differs only slightly from its chains of multiply-adds."""
    modelled, fast = (chains(kind, devices.Emulated("sm_90a", n)).view(np.float32) for n in ("hardware", "fast"))
    assert (modelled != fast).any()
    np.testing.assert_allclose(modelled, fast, rtol=1e-5, atol=1e-6 * np.abs(fast).max())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["f16", "bf16", "e4m3"])
def test_chains_have_the_bits_of_hopper(kind: str) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    np.testing.assert_array_equal(chains(kind, devices.Emulated("sm_90a")), chains(kind, devices.Gpu()))


# ------------------------------------------------------------------ moves, against a GPU
MOVED = 13  # words of a lane


def moves_text() -> str:
    """Return a kernel of one warp that moves matrices between lanes in every way that Hopper supports too."""
    groups = ["{" + ", ".join(f"%r{r}" for r in range(first, first + 4)) + "}" for first in (2, 10, 14, 20)]
    read, plain, transposed, stored = groups
    body = "mul.lo.u32 %r1, %thread, 16; cvt.u64.u32 %d0, %r1; add.u64 %d0, %a0, %d0;\n"
    body += f"ld.global.v4.b32 {read}, [%d0]; mov.u32 %r6, smem; add.u32 %r7, %r6, %r1;\n"
    body += f"st.shared.v4.b32 [%r7], {read}; bar.warp.sync -1;\n"
    body += f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {plain}, [%r7];\n"
    body += f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {transposed}, [%r7];\n"
    body += "movmatrix.sync.aligned.m8n8.trans.b16 %r18, %r10; bar.warp.sync -1;\n"
    body += f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r7], {plain}; bar.warp.sync -1;\n"
    body += f"ld.shared.v4.b32 {stored}, [%r7];\n"
    body += f"mul.lo.u32 %r1, %thread, {4 * MOVED}; cvt.u64.u32 %d1, %r1; add.u64 %d1, %a1, %d1;\n"
    words = [*range(10, 19), *range(20, 24)]
    body += "".join(f"st.global.b32 [%d1+{4 * k}], %r{r};\n" for k, r in enumerate(words))
    return devices.module_text("sm_90a", devices.entry("k", "u64 u64", body), shared=True)


def moved(device: devices.Device) -> np.ndarray:
    words = torch.from_numpy(noise(32).view(np.int32).reshape(-1)).to(device.torch_device)
    out = torch.zeros(32 * MOVED, dtype=torch.int32, device=device.torch_device)
    device.launch(moves_text(), 1, 32, 512, [words, out])
    return out.cpu().numpy().reshape(32, MOVED)


def test_moves_lose_nothing() -> None:
    """Each group of words holds all words that were read, in another order."""
    found, halves = moved(devices.Emulated("sm_90a")), np.sort(noise(32).view(np.uint16).reshape(-1))
    for words in (slice(0, 4), slice(4, 8), slice(9, 13)):
        np.testing.assert_array_equal(
            np.sort(np.ascontiguousarray(found[:, words]).view(np.uint16).reshape(-1)), halves
        )
    np.testing.assert_array_equal(found[:, 8], found[:, 4])  # movmatrix and ldmatrix transpose alike


@pytest.mark.gpu
def test_moves_have_the_bits_of_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    np.testing.assert_array_equal(moved(devices.Emulated("sm_90a")), moved(devices.Gpu()))
