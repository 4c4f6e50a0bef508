"""tcgen05.mma in raw PTX: every M, A in shared and in tensor memory, lane masks, scaled D; multi-CTA tcgen05.commit.

M covers one CTA and a pair. Operands and results are placed by hand; tmem_harness.py names the sources of the layouts.
Sums are exact in float32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.device.ptx import empty, run_ptx
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

from hopwell.emulator import EmulatorError, UninitializedRead, Unsupported

# Instruction kind, and the code of the format in its descriptor.
KINDS = {
    "f16": ("f16", 0), "bf16": ("f16", 1), "tf32": ("tf32", 2), "u8": ("i8", 0), "s8": ("i8", 1),
    "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1), "e2m3": ("f8f6f4", 3), "e3m2": ("f8f6f4", 4), "e2m1": ("f8f6f4", 5),
}  # fmt: skip
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
INTEGERS = {"u8": torch.uint8, "s8": torch.int8}
SHAPES = [(64, 1), (128, 1), (128, 2), (256, 2)]
IDS = ["64", "128", "pair of 64", "pair of 128"]
N = 32
AT_A, COLUMNS = N, N + 16


class Operand:
    """``steps`` instructions of k: values, bytes in shared memory and bytes in tensor memory."""

    def __init__(self, kind: str, rows: int, steps: int, seed: int):
        dtype = (FLOATS | INTEGERS).get(kind)
        self.k = 32 // dtype.itemsize if dtype else 32
        shape = (rows, self.k * steps)
        if dtype:
            low, high = (-8, 9) if kind in FLOATS else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)
            drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
            stored = (drawn / 4 if kind in FLOATS else drawn).to(dtype)
            self.values = stored.double().numpy()
            self.shared = self.tensor = stored.view(torch.uint8).numpy()
        else:
            codes = draw(kind, shape, 0.5, 2, seed)
            self.values = VALUES[kind][codes]
            self.shared = packed(codes, kind, tight=False)
            # Tensor memory has a byte for each element; a 4-bit element is in bits 2 to 5.
            self.tensor = codes << 2 if kind == "e2m1" else codes

    def image(self, rows: slice) -> np.ndarray:
        return np.concatenate(
            [k_major(x, 128, 256, size=32 * len(x)) for x in np.split(self.shared[rows], self.shared.shape[1] // 32, 1)]
        )


class Product:
    """d = a b^T in ``steps`` instructions; the first may accumulate onto the contents of D."""

    def __init__(self, kind, m, ctas, in_tmem=False, steps=2, b_kind=None, seed=0):
        self.kind, self.m, self.ctas, self.in_tmem, self.steps = kind, m, ctas, in_tmem, steps
        self.b_kind = b_kind or kind
        self.a, self.b = Operand(kind, m, steps, seed), Operand(self.b_kind, N, steps, seed + 1)
        own_m, own_n = m // ctas, N // ctas
        self.images = [
            np.concatenate(
                [self.b.image(slice(own_n * c, own_n * c + own_n)), self.a.image(slice(own_m * c, own_m * c + own_m))]
            )
            for c in range(ctas)
        ]
        self.before = noise(ctas, LANES, COLUMNS, seed=seed)
        if in_tmem:
            place_rows(np.ascontiguousarray(self.a.tensor).view(np.uint32), m, ctas, self.before, AT_A)
        self.value = (self.a.values @ self.b.values.T).astype(np.int32 if kind in INTEGERS else np.float32)

    def instructions(self, onto=False, mask=(), tail="", flags=0) -> str:
        (kind, code), (_, b_code), result = KINDS[self.kind], KINDS[self.b_kind], 2 if self.kind in INTEGERS else 1
        idesc = result << 4 | code << 7 | b_code << 10 | N >> 3 << 17 | self.m >> 4 << 24 | flags
        own_m, own_n = self.m // self.ctas, N // self.ctas
        lanes = ", ".join(f"%r{k}" for k in range(20, 20 + len(mask)))
        out = "".join(f"mov.b32 %r{20 + k}, {word:#x};\n" for k, word in enumerate(mask))
        out += address("%r110", 0) + f"mov.b32 %r113, {idesc:#x};\n"
        for step in range(self.steps):
            out += descriptor("%d2", 32 * own_n * step, 128, 256)
            out += descriptor("%d1", 32 * (own_n * self.steps + own_m * step), 128, 256)
            out += address("%r111", AT_A + 8 * step)
            out += f"setp.ne.u32 %p4, {int(onto or step > 0)}, 0;\n"
            a = "[%r111]" if self.in_tmem else "%d1"
            vector = f", {{{lanes}}}" if mask else ""
            out += f"tcgen05.mma.cta_group::{self.ctas}.kind::{kind} [%r110], {a}, %d2, %r113{vector}, %p4{tail};\n"
        return out

    def run(self, text: str | None = None, **settings) -> np.ndarray:
        text = text or self.instructions()
        return run_tmem(text, self.before, self.images, self.ctas == 2, **settings)

    def wanted(self, d: np.ndarray) -> np.ndarray:
        out = self.before.copy()
        place_result(d, self.ctas, out)
        return out


@pytest.mark.parametrize("in_tmem", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize(("m", "ctas"), SHAPES, ids=IDS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "u8", "s8", "e4m3", "e5m2"])
def test_shapes_and_places_of_a(kind, m, ctas, in_tmem):
    problem = Product(kind, m, ctas, in_tmem)
    np.testing.assert_array_equal(problem.run(), problem.wanted(problem.value))


@pytest.mark.parametrize("in_tmem", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize(("kind", "b_kind"), [("e2m1", "e4m3"), ("e2m3", "e2m1"), ("e3m2", "e3m2"), ("e4m3", "e2m3")])
def test_sub_byte_formats(kind, b_kind, in_tmem):
    """Elements are packed in the first bytes of each 16 in shared memory, and have a byte each in tensor memory."""
    problem = Product(kind, 128, 1, in_tmem, b_kind=b_kind)
    np.testing.assert_array_equal(problem.run(), problem.wanted(problem.value))


def test_packed_elements_decompressed_into_operand_a():
    """tcgen05.cp with b4x16_p64 converts A from its shared-memory form to its tensor-memory form."""
    problem = Product("e2m1", 128, 1, in_tmem=True, steps=1, b_kind="e4m3")
    wanted = problem.wanted(problem.value)
    problem.before[:, :, AT_A : AT_A + 8] = noise(1, LANES, 8, seed=5)
    copy = (
        descriptor("%d3", 32 * N, 128, 256) + address("%r112", AT_A)
        + "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r112], %d3;\n"
    )  # fmt: skip
    np.testing.assert_array_equal(problem.run(copy + problem.instructions()), wanted)


@pytest.mark.parametrize(("m", "ctas"), SHAPES, ids=IDS)
def test_accumulation_onto_what_tensor_memory_holds(m, ctas):
    problem = Product("bf16", m, ctas, in_tmem=True)
    old = np.random.default_rng(3).integers(-50, 50, (m, N)).astype(np.float32)
    place_result(old, ctas, problem.before)
    after = problem.run(problem.instructions(onto=True))
    np.testing.assert_array_equal(after, problem.wanted(old + problem.value))


@pytest.mark.parametrize("saturate", [False, True])
def test_sums_of_integers_that_overflow(saturate):
    """CUTLASS, mma_sm100_desc.hpp: bit 3 of the instruction descriptor saturates sums of kind::i8."""
    problem = Product("s8", 128, 1, steps=1)
    old = np.where(np.arange(N) % 2, 2**31 - 5, 5 - 2**31).astype(np.int32) + np.zeros((128, 1), np.int32)
    place_result(old, 1, problem.before)
    after = problem.run(problem.instructions(onto=True, flags=8 * saturate))
    total = old.astype(np.int64) + problem.value
    assert (np.abs(total) >= 2**31).any()
    wanted = np.clip(total, -(2**31), 2**31 - 1) if saturate else total
    np.testing.assert_array_equal(after, problem.wanted(wanted.astype(np.int32)))


@pytest.mark.parametrize("scale", [1, 4, 15])
def test_scaled_accumulator(scale):
    """PTX ISA, "tcgen05.mma": scale-input-d multiplies D by 2 to the power of -scale before the product is added."""
    problem = Product("f16", 128, 1, steps=1)
    old = np.random.default_rng(3).integers(-50, 50, (128, N)).astype(np.float32)
    place_result(old, 1, problem.before)
    after = problem.run(problem.instructions(onto=True, tail=f", {scale}"))
    np.testing.assert_array_equal(after, problem.wanted((old * 2.0**-scale + problem.value).astype(np.float32)))


@pytest.mark.parametrize(("m", "ctas"), SHAPES, ids=IDS)
def test_output_lane_mask(m, ctas):
    """A bit of the mask stands for a lane of tensor memory, not for a row; a pair has 256 lanes."""
    problem = Product("f16", m, ctas, steps=1)
    mask = [int(x) for x in noise(4 * ctas, seed=8)]
    after = problem.run(problem.instructions(mask=mask))
    wanted = problem.wanted(problem.value)
    for lane in range(LANES * ctas):
        if mask[lane // 32] >> lane % 32 & 1:
            wanted[lane // LANES, lane % LANES] = problem.before[lane // LANES, lane % LANES]
    np.testing.assert_array_equal(after, wanted)


def test_a_pair_needs_a_mask_of_eight_words():
    problem = Product("f16", 256, 2, steps=1)
    with pytest.raises(Unsupported, match="mask of 4 words"):
        problem.run(problem.instructions(mask=[1, 0, 0, 0]))


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_products_of_one_thread_run_in_order(schedule):
    """PTX ISA, "tcgen05 pipelined instructions": the second product accumulates onto the first without a wait."""
    problem = Product("bf16", 128, 2, in_tmem=True)
    np.testing.assert_array_equal(problem.run(schedule=schedule, seed=4), problem.wanted(problem.value))


def test_both_halves_of_the_lanes_need_operand_a():
    """CUTLASS, UMMA::TmemAllocMode::Duplicated: M = 128 of a pair."""
    problem = Product("bf16", 128, 2, in_tmem=True)
    problem.before[1, 70, AT_A] ^= 1
    with pytest.raises(EmulatorError, match="lane groups that must hold copies"):
        problem.run()


def test_operand_a_that_nobody_wrote():
    problem = Product("bf16", 128, 1, in_tmem=True, steps=1)
    text = problem.instructions().replace("[%r111]", "[%r112]")
    with pytest.raises(UninitializedRead, match="never written"):
        run_tmem(address("%r112", COLUMNS + 2) + text, problem.before, problem.images)


# ------------------------------------------------------------------ commit
@pytest.mark.parametrize("mask", [0b0001, 0b1010, 0b1111])
@pytest.mark.parametrize("issuer", [0, 2])
def test_commit_signals_the_ctas_of_its_mask(mask, issuer):
    """The barrier at the same offset in every CTA of the mask completes exactly one phase, and in no other CTA.

    Two phases would look like none.
    """
    out = empty(4)
    run_ptx(
        f"""
        mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.eq.and.u32 %p3, %r2, {issuer}, %p1; mov.b16 %h1, {mask};
        @%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mbarrier.test_wait.parity.shared.b64 %p4, [%r1], 0; selp.u32 %r6, 1, 2, %p4;
        cvt.u64.u32 %d1, %r2; shl.b64 %d1, %d1, 2; add.u64 %d1, %a0, %d1; @%p1 st.global.b32 [%d1], %r6;
        """,
        out, grid=4, cluster=4, shared=16, target="sm_100a", race=True, proxy=True,
    )  # fmt: skip
    assert out.tolist() == [1 if mask >> cta & 1 else 2 for cta in range(4)]


def test_commit_without_a_mask_signals_the_barrier_of_its_address():
    """A shared::cluster address of another CTA is that CTA's barrier."""
    out = empty(2)
    run_ptx(
        """
        mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.eq.and.u32 %p3, %r2, 0, %p1; mapa.shared::cluster.u32 %r3, %r1, 1;
        @%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mbarrier.test_wait.parity.shared.b64 %p4, [%r1], 0; selp.u32 %r6, 1, 2, %p4;
        cvt.u64.u32 %d1, %r2; shl.b64 %d1, %d1, 2; add.u64 %d1, %a0, %d1; @%p1 st.global.b32 [%d1], %r6;
        """,
        out, grid=2, cluster=2, shared=16, target="sm_100a", race=True, proxy=True,
    )  # fmt: skip
    assert out.tolist() == [2, 1]
