"""Runs tensor-core instructions between an input and an output image of tensor memory.

Every CTA loads its image of shared memory and of tensor memory. One thread of CTA 0 executes the tested instructions
and commits them. All of the tensor memory comes back, so tests also compare cells that an instruction must not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from helpers.device.ptx import run_ptx

LANES = 128
DATA = 1024  # offset of the shared-memory image, behind the tensor-memory address and the mbarrier
SWIZZLES = {16: 0, 128: 2, 64: 4, 32: 6}  # CUTLASS mma_sm100_desc.hpp, LayoutType, by width of the swizzle in bytes


def descriptor(register: str, offset: int, lbo: int, sbo: int, width: int = 16) -> str:
    """Return instructions that put a shared-memory descriptor of the image at ``offset`` into a register."""
    rest = lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | SWIZZLES[width] << 61
    return (
        f"add.u32 %r103, %r100, {DATA + offset}; shr.u32 %r103, %r103, 4; cvt.u64.u32 {register}, %r103;"
        f" or.b64 {register}, {register}, {rest:#x};\n"
    )


def address(register: str, column: int, lane: int = 0) -> str:
    return f"add.u32 {register}, %r101, {lane << 16 | column};\n"


def run_tmem(
    single: str,
    tmem: np.ndarray,
    images: Sequence[np.ndarray] = (),
    pair: bool = False,
    everyone: str = "",
    target: str = "sm_100a",
    **settings: object,
) -> np.ndarray:
    """Return tensor memory [cta][lane][column] after ``single`` and then ``everyone``, which all threads execute.

    %r101 is the address of the first column, %r100 of shared memory; %r104.., %d1.., %p4.. and %h.. are free.
    """
    ctas, _, columns = tmem.shape
    group = 2 if pair else 1
    size = max((len(x) for x in images), default=0)
    size += -size % 16
    source = np.zeros((ctas, max(16, size)), np.uint8)
    for row, image in zip(source, images, strict=False):
        row[: len(image)] = image
    allocated = max(32, 1 << (columns - 1).bit_length())
    mask = (1 << ctas) - 1
    chunks = range(0, columns, 16)
    words = ", ".join(f"%r{k}" for k in range(16))
    load = "".join(
        "".join(f"ld.global.b32 %r{k}, [%d60+{4 * (c + k)}];" for k in range(16))
        + f"\ntcgen05.st.sync.aligned.32x32b.x16.b32 [%r106+{c}], {{{words}}};\n"
        for c in chunks
    )
    dump = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{words}}}, [%r106+{c}];\ntcgen05.wait::ld.sync.aligned;\n"
        + "".join(f"st.global.b32 [%d61+{4 * (c + k)}], %r{k};" for k in range(16))
        for c in chunks
    )
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n" if ctas > 1 else "bar.sync 0;\n"
    body = f"""
    mov.u32 %r100, dynamic; mov.u32 %r102, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %warp, 0;
    @!%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r100], {allocated};
    ALLOCATED:
    add.u32 %r105, %r100, 8; @%p1 mbarrier.init.shared.b64 [%r105], 1;
    mul.lo.u32 %r107, %r102, {source.shape[1]}; cvt.u64.u32 %d60, %r107; add.u64 %d60, %a0, %d60;
    shl.b32 %r107, %tid, 2;
    FILL: setp.ge.u32 %p3, %r107, {size}; @%p3 bra FILLED;
    cvt.u64.u32 %d61, %r107; add.u64 %d61, %d60, %d61; ld.global.b32 %r108, [%d61];
    add.u32 %r109, %r100, %r107; st.shared.b32 [%r109+{DATA}], %r108; add.u32 %r107, %r107, {LANES * 4}; bra FILL;
    FILLED:
    fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
    ld.shared.b32 %r101, [%r100]; shl.b32 %r106, %warp, 21; add.u32 %r106, %r106, %r101;
    mad.lo.u32 %r107, %r102, {LANES}, %tid; mul.lo.u32 %r107, %r107, {4 * columns}; cvt.u64.u32 %d61, %r107;
    add.u64 %d60, %a1, %d61; add.u64 %d61, %a2, %d61;
    {load}
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
    {meet}
    tcgen05.fence::after_thread_sync;
    setp.eq.and.u32 %p3, %r102, 0, %p1; @!%p3 bra ISSUED;
    {single}
    mov.b16 %h60, {mask};
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r105], %h60;
    ISSUED:
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r105], 0; @!%p3 bra WAIT;
    bar.warp.sync -1;
    tcgen05.fence::after_thread_sync;
    {everyone}
    {dump}
    tcgen05.fence::before_thread_sync;
    {meet}
    @!%p2 bra FREED;
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r101, {allocated};
    FREED:
    """
    before = torch.from_numpy(np.ascontiguousarray(tmem).view(np.int32))
    after = torch.zeros_like(before)
    checks = {"race": True, "proxy": True, "strict": True, **settings}
    run_ptx(
        body, torch.from_numpy(source), before, after, grid=ctas, cluster=ctas, block=LANES, smem=DATA + size,
        target=target, roles="in in out", **checks,
    )  # fmt: skip
    return after.numpy().view(np.uint32)


def noise(*shape: int, seed: int = 1) -> np.ndarray:
    """Return words that no instruction writes by accident."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


def k_major(rows: np.ndarray, lbo: int, sbo: int, width: int = 16, size: int | None = None) -> np.ndarray:
    """Return the bytes of [row][k] as a K-major operand in shared memory: CUTLASS mma_traits_sm100.hpp, canonical
    layouts.

    Eight rows of ``width`` bytes follow each other; the next eight rows start ``sbo`` bytes later. Without a swizzle
    (16), the next 16 bytes of k are ``lbo`` bytes later. With one, the chunk number is XORed with the row number
    (CUTLASS Swizzle<B, 4, 3>).
    """
    count, k = rows.shape
    out = np.zeros(size or (count - 1) // 8 * sbo + 8 * max(width, lbo * (k // 16)), np.uint8)
    for r in range(count):
        for c in range(k // 16):
            at = r // 8 * sbo + r % 8 * width + (c * lbo if width == 16 else 16 * c)
            at ^= (at >> 7 & (width // 16 - 1)) << 4
            out[at : at + 16] = rows[r, 16 * c : 16 * c + 16]
    return out


def mn_major(rows: np.ndarray, element: int, lbo: int, sbo: int, width: int = 16) -> np.ndarray:
    """Return the bytes of [row][k bytes] as an MN-major operand in shared memory: CUTLASS mma_traits_sm100.hpp,
    canonical layouts.

    Chunks of 16 bytes hold one k of 16 / ``element`` neighbouring rows. Eight k of ``width`` bytes of rows follow each
    other. The next rows start ``lbo`` bytes later, the next eight k ``sbo`` bytes later; without a swizzle (16), the
    other way round. With one, the chunk number is XORed with the number of k (CUTLASS Swizzle<B, 4, 3>).
    """
    by_k = rows.reshape(len(rows), -1, element).transpose(1, 0, 2).reshape(-1, len(rows) * element)
    next_rows, next_k = (sbo, lbo) if width == 16 else (lbo, sbo)
    out = {}
    for k, line in enumerate(by_k):
        for c in range(len(line) // 16):
            at = 16 * c % width + 16 * c // width * next_rows + k % 8 * width + k // 8 * next_k
            out[at ^ (at >> 7 & (width // 16 - 1)) << 4] = line[16 * c : 16 * c + 16]
    image = np.zeros(max(out) + 16, np.uint8)
    for at, chunk in out.items():
        image[at : at + 16] = chunk
    return image


# ------------------------------------------------------------------ matrices
def minifloat(exponent: int, mantissa: int, bias: int, signed: bool = True) -> np.ndarray:
    """Return the values of all codes of a small float without infinities."""
    codes = np.arange(1 << (exponent + mantissa))
    e, f = codes >> mantissa, codes & ((1 << mantissa) - 1)
    values = np.where(e == 0, f * 2.0 ** (1 - bias), (f + (1 << mantissa)) * 2.0 ** (e - bias)) * 2.0**-mantissa
    return np.concatenate([values, -values]) if signed else values


# OCP, "8-bit floating point" and "microscaling formats"; e4m3 and e5m2 codes that are not numbers stay unused.
VALUES = {
    "e4m3": minifloat(4, 3, 7), "e5m2": minifloat(5, 2, 15), "e2m3": minifloat(2, 3, 1), "e3m2": minifloat(3, 2, 3),
    "e2m1": minifloat(2, 1, 1), "ue4m3": minifloat(4, 3, 7, signed=False), "ue8m0": 2.0 ** (np.arange(256) - 127),
}  # fmt: skip


def draw(kind: str, shape: tuple[int, ...], low: float, high: float, seed: int) -> np.ndarray:
    """Draw random codes of values with low <= |value| <= high, so that sums of products are exact in float32."""
    size = np.abs(VALUES[kind])
    codes = np.flatnonzero((size >= low) & (size <= high)).astype(np.uint8)
    return np.random.default_rng(seed).choice(codes, shape)


def packed(codes: np.ndarray, kind: str, tight: bool) -> np.ndarray:
    """Return the bytes of rows in shared memory.

    kind::f8f6f4 keeps sixteen elements in 16 bytes, kind::mxf4 packs tightly.
    """
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 8)
    out = np.zeros((codes.shape[0], codes.shape[1] // 16, bits * 2 if tight else 16), np.uint8)
    for r in range(out.shape[0]):
        for c in range(out.shape[1]):
            number = sum(int(x) << bits * k for k, x in enumerate(codes[r, 16 * c : 16 * c + 16]))
            out[r, c, : 2 * bits] = np.frombuffer(number.to_bytes(2 * bits, "little"), np.uint8)
    return out.reshape(codes.shape[0], -1)


def place_rows(words: np.ndarray, m: int, ctas: int, tmem: np.ndarray, column: int) -> None:
    """Place A in tensor memory: CUTLASS mma_traits_sm100_frag.hpp, tmem_frg (M = 128 of a pair: Duplicated)."""
    own = m // ctas
    for cta in range(ctas):
        rows = words[own * cta : own * cta + own]
        for r in range(own):
            lanes = [r // 16 * 32 + r % 16] if m == 64 else [r, r + 64] if own == 64 else [r]
            tmem[cta, lanes, column : column + rows.shape[1]] = rows[r]


def place_result(d: np.ndarray, ctas: int, tmem: np.ndarray, column: int = 0) -> None:
    """Place D in tensor memory: PTX ISA, "data path layout organization" (layouts A, B, D, F); CUTLASS, tmem_frg."""
    m, n = d.shape
    own = m // ctas
    words = d.view(np.uint32)
    for cta in range(ctas):
        for r in range(own):
            row = words[own * cta + r]
            if m == 64:
                tmem[cta, r // 16 * 32 + r % 16, column : column + n] = row
            elif own == 64:
                tmem[cta, r, column : column + n // 2] = row[: n // 2]
                tmem[cta, r + 64, column : column + n // 2] = row[n // 2 :]
            else:
                tmem[cta, r, column : column + n] = row


def place_split_result(d: np.ndarray, tmem: np.ndarray) -> None:
    """Place D of a .ws instruction in one CTA: PTX ISA, layouts D, E and G; CUTLASS, tmem_frg_ws.

    Each of the 128 / M groups of lanes holds a range of the columns.
    """
    m, n = d.shape
    width = n * m // LANES
    for group in range(LANES // m):
        tmem[m * group : m * group + m, :width] = d.view(np.uint32)[:, width * group : width * group + width]
