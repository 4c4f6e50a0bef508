"""tcgen05.mma on operands in shared memory: shapes, CTA pairs, formats and majors, in a kernel written with the DSL.

CuTe's own layouts place the operands and read the accumulator, so descriptors and tensor-memory layouts are checked
against an independent description of them.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100
from helpers.device.dsl_kernels import TORCH, compiled, fake

from hopwell.emulator import report, use

K, MN = OperandMajorMode.K, OperandMajorMode.MN
COLUMNS = 512
LOADS = {
    "32x32b": lambda pack: tcgen05.Ld32x32bOp(tcgen05.Repetition.x16, pack),
    "16x64b": lambda pack: tcgen05.Ld16x64bOp(tcgen05.Repetition.x8, pack),
    "16x128b": lambda pack: tcgen05.Ld16x128bOp(tcgen05.Repetition.x4, pack),
    "16x256b": lambda pack: tcgen05.Ld16x256bOp(tcgen05.Repetition.x2, pack),
}


class Tile:
    """d[m][n] = a[m][k] b[n][k]^T with one instruction per 32 bytes of k, on one CTA or a pair."""

    def __init__(self, dtype, m, n, k, pair=False, a_major=K, b_major=K, acc=cutlass.Float32, load="32x32b"):
        self.dtype, self.m, self.n, self.k, self.acc = dtype, m, n, k, acc
        self.group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
        self.ctas = 2 if pair else 1
        self.a_major, self.b_major, self.load = a_major, b_major, load

    def operation(self):
        source = tcgen05.OperandSource.SMEM
        rest = ((self.m, self.n, 256 // self.dtype.width), self.group, source, self.a_major, self.b_major)
        if self.dtype in (cutlass.BFloat16, cutlass.Float16):
            return tcgen05.MmaF16BF16Op(self.dtype, self.acc, *rest)
        if self.dtype == cutlass.TFloat32:
            return tcgen05.MmaTF32Op(*rest)
        if self.dtype in (cutlass.Int8, cutlass.Uint8):
            return tcgen05.MmaI8Op(self.dtype, *rest)
        return tcgen05.MmaF8F6F4Op(self.dtype, self.dtype, self.acc, *rest)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream):
        mma = cute.make_tiled_mma(cute.make_mma_atom(self.operation()))
        tile = (self.m, self.n, self.k)
        la = sm100.make_smem_layout_a(mma, tile, self.dtype, 1)
        lb = sm100.make_smem_layout_b(mma, tile, self.dtype, 1)
        self.kernel(mma, a, b, d, la, lb).launch(
            grid=[self.ctas, 1, 1], block=[128, 1, 1], cluster=[self.ctas, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        la: cute.ComposedLayout,
        lb: cute.ComposedLayout,
    ):
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.block_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        slot = smem.allocate_array(Int32, 1)
        bar = smem.allocate_array(Int64, 1)
        sa = smem.allocate_tensor(self.dtype, la.outer, 1024, swizzle=la.inner)
        sb = smem.allocate_tensor(self.dtype, lb.outer, 1024, swizzle=lb.inner)
        part = mma.get_slice(rank)
        self.copy(part.partition_A(a), sa[None, None, None, 0], tid)
        self.copy(part.partition_B(b), sb[None, None, None, 0], tid)
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, slot, is_two_cta=self.ctas == 2)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        tmem = cute.arch.retrieve_tmem_ptr(self.acc, 16, slot)
        acc = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C((self.m, self.n))).layout)
        fa, fb = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        if warp == 0 and rank == 0:
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for i in cutlass.range_constexpr(cute.size(fa, mode=[2])):
                cute.gemm(mma, acc, fa[None, None, i, 0], fb[None, None, i, 0], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                mask = 3 if const_expr(self.ctas == 2) else None
                tcgen05.commit(bar, mask, self.group)
        cute.arch.mbarrier_wait(bar, 0)
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
        self.read(acc, part.partition_C(d), tid)
        cute.arch.sync_threads()
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            cute.arch.dealloc_tmem(tmem, COLUMNS, is_two_cta=self.ctas == 2)

    @cute.jit
    def copy(self, source: cute.Tensor, target: cute.Tensor, tid: Int32):
        for i in range(tid, cute.size(target), 128):
            target[i] = source[i]

    @cute.jit
    def read(self, acc: cute.Tensor, target: cute.Tensor, tid: Int32):
        flat = acc[(None, None), 0, 0]
        # A 16-bit accumulator takes a 32-bit column; the load drops the upper half.
        pack = tcgen05.Pack.PACK_16b_IN_32b if const_expr(self.acc.width == 16) else tcgen05.Pack.NONE
        atom = cute.make_copy_atom(LOADS[self.load](pack), self.acc)
        copy = tcgen05.make_tmem_copy(atom, flat)
        mine = copy.get_slice(tid)
        out = mine.partition_D(target[(None, None), 0, 0])
        values = cute.make_rmem_tensor(out.shape, self.acc)
        cute.copy(copy, mine.partition_S(flat), values)
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range(cute.size(values), unroll_full=True):
            out[i] = values[i]


def product(dtype, m, n, k, low=-3, high=4, **options):
    acc = options.get("acc", cutlass.Float32)
    parameters = (dtype.__name__, m, n, k, sorted((key, str(value)) for key, value in options.items()))
    function = compiled(
        lambda: Tile(dtype, m, n, k, **options), parameters, lambda: (fake(dtype), fake(dtype), fake(acc)), "sm_100a"
    )
    g = torch.Generator().manual_seed(m + n)
    a, b = (torch.randint(low, high, (rows, k), generator=g).to(TORCH[dtype]) for rows in (m, n))
    d = torch.full((m, n), 77, dtype=TORCH[acc])
    with use("sm_100a", race=True, proxy=True, strict=True):
        function(a, b, d, tensors={})
    return d.double(), a.double() @ b.double().t()


@pytest.mark.parametrize(("m", "pair"), [(64, False), (128, False), (128, True), (256, True)])
def test_shapes(m, pair):
    d, wanted = product(cutlass.BFloat16, m, 64, 64, pair=pair, load="32x32b" if m > 64 else "16x256b")
    assert torch.equal(d, wanted)
    assert report().totals["matrix flops"] == 2 * m * 64 * 64


@pytest.mark.parametrize("n", [16, 256])
def test_widths(n):
    d, wanted = product(cutlass.Float16, 128, n, 64)
    assert torch.equal(d, wanted)


@pytest.mark.parametrize(("a_major", "b_major"), [(MN, K), (K, MN), (MN, MN)], ids=["a", "b", "ab"])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_mn_major_operands(a_major, b_major, pair):
    d, wanted = product(cutlass.BFloat16, 128, 64, 64, pair=pair, a_major=a_major, b_major=b_major)
    assert torch.equal(d, wanted)


@pytest.mark.parametrize("dtype", [cutlass.Float8E4M3FN, cutlass.Float8E5M2])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_8_bit_floats(dtype, pair):
    d, wanted = product(dtype, 128, 64, 128, pair=pair)
    assert torch.equal(d, wanted)


def test_8_bit_integers():
    d, wanted = product(cutlass.Int8, 128, 64, 128, acc=cutlass.Int32, low=-128, high=128)
    assert torch.equal(d, wanted)


def test_f16_accumulators_take_a_column_each():
    d, wanted = product(cutlass.Float16, 128, 64, 64, acc=cutlass.Float16)
    assert torch.equal(d, wanted)


@pytest.mark.parametrize(("a_major", "b_major"), [(MN, K), (K, MN), (MN, MN)], ids=["a", "b", "ab"])
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_mn_major_operands_of_8_bits(a_major, b_major, pair):
    d, wanted = product(cutlass.Float8E4M3FN, 128, 64, 64, pair=pair, a_major=a_major, b_major=b_major)
    assert torch.equal(d, wanted)


@pytest.mark.parametrize("load", ["16x64b", "16x128b", "16x256b"])
def test_load_shapes_agree_with_cute(load):
    """M = 64 keeps 16 rows in each quarter of the lanes, which the 16-lane shapes read."""
    d, wanted = product(cutlass.BFloat16, 64, 64, 64, load=load)
    assert torch.equal(d, wanted)


def test_16_lane_loads_of_128_rows():
    """With M = 128, a warp needs two loads for its 32 lanes."""
    d, wanted = product(cutlass.BFloat16, 128, 64, 64, load="16x256b")
    assert torch.equal(d, wanted)
