"""Properties and refusals of the emulated device, by architecture; and the single build of sm_120's family."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.nvgpu import cpasync, warp
from helpers.device.dsl_kernels import compiled, fake
from helpers.device.ptx import run_ptx

from hopwell.emulator import EmulatorError, use
from hopwell.emulator.host.runtime import (
    ATTRIBUTE_CTA_SHARED,
    ATTRIBUTE_MAJOR,
    ATTRIBUTE_MINOR,
    ATTRIBUTE_SM_SHARED,
    Runtime,
)
from hopwell.emulator.options import ARCHITECTURES, LIMITS


@pytest.mark.parametrize(("arch", "most"), [("sm_90a", 232448), ("sm_100a", 232448), ("sm_120a", 101376)])
def test_a_cta_has_the_shared_memory_of_its_architecture(arch: str, most: int) -> None:
    run_ptx("", smem=most, target=arch)
    run_ptx("", smem=most - 4096, shared=4096, target=arch)
    with pytest.raises(EmulatorError, match=f"{most + 16} bytes of shared memory; a CTA of {arch} can have {most}"):
        run_ptx("", smem=most + 16, target=arch)
    with pytest.raises(EmulatorError, match=f"can have {most}"):
        run_ptx("", smem=most, shared=16, target=arch)


@pytest.mark.parametrize(
    ("arch", "capability", "shared"),
    [
        ("sm_90a", (9, 0), 233472),
        ("sm_103a", (10, 3), 233472),
        ("sm_120a", (12, 0), 102400),
        ("sm_121a", (12, 1), 102400),
    ],
)
def test_device_attributes(arch: str, capability: tuple[int, int], shared: int) -> None:
    asked = (ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR, ATTRIBUTE_SM_SHARED, ATTRIBUTE_CTA_SHARED)
    runtime = Runtime(lambda name, launch: None, lambda name: [])
    with use(arch):
        assert [runtime.device_attribute(a) for a in asked] == [*capability, shared, shared - 1024]


def test_every_architecture_has_limits() -> None:
    assert set(LIMITS) == set(ARCHITECTURES)


class Product:
    """D = A B^T of one warp: A and B by TMA into shared memory, ldmatrix, mma.sync, D from registers."""

    m, n, k = 16, 8, 64

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream):
        la, lb = (cute.make_layout((rows, self.k), stride=(self.k, 1)) for rows in (self.m, self.n))
        load = cpasync.CopyBulkTensorTileG2SOp()
        ta, va = cpasync.make_tiled_tma_atom(load, a, la, (self.m, self.k))
        tb, vb = cpasync.make_tiled_tma_atom(load, b, lb, (self.n, self.k))
        self.kernel(ta, va, tb, vb, d, la, lb).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, ta: cute.CopyAtom, va: cute.Tensor, tb: cute.CopyAtom, vb: cute.Tensor, d: cute.Tensor, la, lb):
        smem = cutlass.memory.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, 1)
        sa = smem.allocate_tensor(cutlass.BFloat16, la, 128)
        sb = smem.allocate_tensor(cutlass.BFloat16, lb, 128)
        lane = cute.arch.lane_idx()
        if lane == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.k * (self.m + self.n))
        cute.arch.sync_warp()
        for atom, view, tile, rows in ((ta, va, sa, self.m), (tb, vb, sb, self.n)):
            g = cute.local_tile(view, (rows, self.k), (0, 0))
            ts, tg = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(g, 0, 2)
            )
            cute.copy(atom, tg, ts, tma_bar_ptr=full)
        cute.arch.mbarrier_wait(full, 0)
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
        part = mma.get_slice(lane)
        fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
        for count, fragment, tile, make in (
            (4, fa, sa, cute.make_tiled_copy_A), (2, fb, sb, cute.make_tiled_copy_B)
        ):  # fmt: skip
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, count), cutlass.BFloat16)
            tiled = make(atom, mma)
            mine = tiled.get_slice(lane)
            cute.copy(tiled, mine.partition_S(tile), mine.retile(fragment))
        out = part.partition_C(cute.local_tile(d, (self.m, self.n), (0, 0)))
        acc = cute.make_rmem_tensor(out.shape, cutlass.Float32)
        acc.fill(0.0)
        cute.gemm(mma, acc, fa, fb, acc)
        cute.autovec_copy(acc, out)


@pytest.mark.parametrize("build", ["sm_120f", "sm_90a"])
def test_one_source_for_the_family_and_for_hopper(build: str) -> None:
    """A kernel for sm_120 with TMA and mma.sync gives the same results, compiled for its family and for Hopper."""
    bf16, f32 = cutlass.BFloat16, cutlass.Float32
    run = compiled(Product, (), lambda: (fake(bf16), fake(bf16), fake(f32)), build)
    a, b = (torch.randint(-8, 9, (rows, Product.k)).to(torch.bfloat16) for rows in (Product.m, Product.n))
    want = (a.double() @ b.double().T).float()
    for arch in ["sm_120a", "sm_121a"] if build == "sm_120f" else ["sm_90a"]:
        d = torch.full((Product.m, Product.n), torch.nan)
        with use(arch, race=True, proxy=True, strict=True):
            run(a, b, d)
        assert torch.equal(d, want)
