"""wgmma: operand layouts, formats and accumulation against exact integer products, in kernels written with the DSL."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Boolean, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from helpers.device.dsl_kernels import TORCH, compiled, fake

from hopwell.emulator import report, use

K, MN = OperandMajorMode.K, OperandMajorMode.MN
BYTES = {
    cutlass.BFloat16: 2,
    cutlass.Float16: 2,
    cutlass.TFloat32: 4,
    cutlass.Float8E4M3FN: 1,
    cutlass.Float8E5M2: 1,
    cutlass.Int8: 1,
}


def atom_kind(major: OperandMajorMode, swizzle: int):
    name = "INTER" if swizzle == 0 else f"SW{swizzle}"
    return getattr(warpgroup.SmemLayoutAtomKind, f"{'K' if major == K else 'MN'}_{name}")


class Product:
    """d[64][n] = a[64][k] b[n][k]^T by one warpgroup; operands are copied element by element into their layouts."""

    def __init__(
        self, dtype, n, k, a_major=K, b_major=K, swizzle=128, registers=False, acc=cutlass.Float32, start=False
    ):
        self.dtype, self.n, self.k, self.acc = dtype, n, k, acc
        self.a_major, self.b_major, self.swizzle = a_major, b_major, swizzle
        self.registers, self.start = registers, start

    def operation(self):
        shape = (64, self.n, 32 // BYTES[self.dtype])
        source = warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM
        if self.dtype in (cutlass.BFloat16, cutlass.Float16):
            return warpgroup.MmaF16BF16Op(self.dtype, self.acc, shape, source, self.a_major, self.b_major)
        if self.dtype in (cutlass.Float8E4M3FN, cutlass.Float8E5M2):
            return warpgroup.MmaF8Op(self.dtype, self.dtype, self.acc, shape, source, self.a_major, self.b_major)
        return warpgroup.MmaI8Op(self.dtype, self.dtype, self.acc, shape, source, self.a_major, self.b_major)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream):
        self.kernel(a, b, d).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        tid = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        sa = self.stage(smem, 64, self.a_major)
        sb = self.stage(smem, self.n, self.b_major)
        for i in range(tid, 64 * self.k, 128):
            sa[i // self.k, i % self.k] = a[i // self.k, i % self.k]
        for i in range(tid, self.n * self.k, 128):
            sb[i // self.k, i % self.k] = b[i // self.k, i % self.k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        mma = cute.make_tiled_mma(cute.make_mma_atom(self.operation()))
        part = mma.get_slice(tid)
        fa = part.make_fragment_A(part.partition_A(sa))
        if const_expr(self.registers):
            fa = part.make_fragment_A(part.partition_shape_A((64, self.k)))
            source = part.partition_A(a)
            for i in cutlass.range_constexpr(cute.size(fa)):
                fa[i] = source[i]
        fb = part.make_fragment_B(part.partition_B(sb))
        acc = cute.make_rmem_tensor(part.partition_shape_C((64, self.n)), self.acc)
        target = part.partition_C(d)
        if const_expr(self.start):
            for i in cutlass.range(cute.size(acc), unroll_full=True):
                acc[i] = target[i]
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, Boolean(self.start))
        for i in cutlass.range_constexpr(self.k * BYTES[self.dtype] // 32):
            cute.gemm(mma, acc, fa[None, None, i], fb[None, None, i], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            target[i] = acc[i]

    def stage(self, smem, rows, major):
        atom = warpgroup.make_smem_layout_atom(atom_kind(major, self.swizzle), self.dtype)
        layout = cute.tile_to_shape(atom, (rows, self.k), (0, 1) if major == K else (1, 0))
        if const_expr(self.swizzle == 0):
            return smem.allocate_tensor(self.dtype, layout, 1024)
        return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)


def product(dtype, n, k, d_start=None, seed=0, low=-3, high=4, **options):
    """Return (emulated result, a, b)."""
    acc = options.get("acc", cutlass.Float32)
    parameters = (dtype.__name__, n, k, sorted((key, str(value)) for key, value in options.items()))
    function = compiled(
        lambda: Product(dtype, n, k, **options), parameters, lambda: (fake(dtype), fake(dtype), fake(acc)), "sm_90a"
    )
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(low, high, (rows, k), generator=g).to(TORCH[dtype]) for rows in (64, n))
    d = torch.full((64, n), 77, dtype=TORCH[acc]) if d_start is None else d_start.clone()
    function(a, b, d, tensors={})
    return d, a, b


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double().t()


@pytest.fixture(autouse=True)
def _checked():
    """Every product here runs under the race detector, the proxy check and strict mode."""
    with use("sm_90a", race=True, proxy=True, strict=True):
        yield


@pytest.mark.parametrize("swizzle", [128, 64, 32, 0])
def test_k_major_operands_in_every_swizzle(swizzle):
    d, a, b = product(cutlass.BFloat16, 64, 64, swizzle=swizzle)
    assert torch.equal(d.double(), exact(a, b))


@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize(("a_major", "b_major"), [(K, MN), (MN, K), (MN, MN)], ids=["b", "a", "ab"])
def test_mn_major_operands(a_major, b_major, swizzle):
    d, a, b = product(cutlass.Float16, 128, 32, a_major=a_major, b_major=b_major, swizzle=swizzle)
    assert torch.equal(d.double(), exact(a, b))


@pytest.mark.parametrize("n", [8, 24, 96, 256])
def test_widths(n):
    d, a, b = product(cutlass.BFloat16, n, 64)
    assert torch.equal(d.double(), exact(a, b))
    assert report().totals["matrix flops"] == 2 * 64 * n * 64


@pytest.mark.parametrize("dtype", [cutlass.BFloat16, cutlass.Float8E4M3FN])
def test_a_from_registers(dtype):
    d, a, b = product(dtype, 64, 64, registers=True)
    assert torch.equal(d.double(), exact(a, b))


@pytest.mark.parametrize("dtype", [cutlass.Float8E4M3FN, cutlass.Float8E5M2])
def test_8_bit_floats(dtype):
    d, a, b = product(dtype, 64, 128)
    assert torch.equal(d.double(), exact(a, b))


def test_8_bit_integers():
    d, a, b = product(cutlass.Int8, 64, 128, acc=cutlass.Int32, low=-128, high=128)
    assert torch.equal(d.double(), exact(a, b))


def test_f16_accumulators():
    d, a, b = product(cutlass.Float16, 64, 64, acc=cutlass.Float16)
    assert torch.equal(d.double(), exact(a, b))


def test_accumulation_onto_earlier_values():
    start = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
    d, a, b = product(cutlass.BFloat16, 32, 64, start=True, d_start=start)
    assert torch.equal(d.double(), start.double() + exact(a, b))


@pytest.mark.parametrize("schedule", ["late", "random", "priority"])
def test_deferred_execution_gives_the_same(schedule):
    with use(schedule=schedule, seed=5):
        d, a, b = product(cutlass.BFloat16, 64, 64)
    assert torch.equal(d.double(), exact(a, b))


# ------------------------------------------------------------------ rounding
def test_short_fp8_accumulator():
    """An 8-bit wgmma keeps 13 fractional bits below the largest term (see native/product.c).

    1 + 2^-14 loses the small term, which a chain of fused multiply-adds keeps.
    """
    parameters = (cutlass.Float8E4M3FN.__name__, 8, 32, [])
    function = compiled(
        lambda: Product(cutlass.Float8E4M3FN, 8, 32),
        parameters,
        lambda: (fake(cutlass.Float8E4M3FN), fake(cutlass.Float8E4M3FN), fake(cutlass.Float32)),
        "sm_90a",
    )
    a, b = torch.zeros(64, 32), torch.zeros(8, 32)
    a[:, 0] = b[:, 0] = 1.0
    a[:, 1], b[:, 1] = 2.0**-7, 2.0**-7
    a[:, 2], b[:, 2] = 2.0**-6, 2.0**-7
    results = {}
    for numerics in ("auto", "fast"):
        d = torch.zeros(64, 8)
        with use(numerics=numerics):
            function(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), d, tensors={})
        results[numerics] = d[0, 0].item()
    assert results == {"auto": 1 + 2.0**-13, "fast": 1 + 2.0**-13 + 2.0**-14}


def model(a: np.ndarray, b: np.ndarray, c: np.ndarray, step: int, fraction: int) -> np.ndarray:
    """Compute the model of native/product.c in rational arithmetic."""
    from fractions import Fraction

    def exponent(x: float) -> int:
        return int(np.frexp(np.float64(x))[1]) - 1 if x else -126

    out = c.copy()
    for i, j in np.ndindex(*c.shape):
        for first in range(0, a.shape[1], step):
            terms = [(exponent(out[i, j]), Fraction(float(out[i, j])))]
            for q in range(first, first + step):
                x, y = float(a[i, q]), float(b[j, q])
                terms.append((exponent(x) + exponent(y), Fraction(x) * Fraction(y)))
            unit = Fraction(2) ** (max(e for e, _ in terms) - fraction)
            total = sum(int(value / unit) for _, value in terms) * unit
            rounded = np.float32(float(total))  # exact in double: fewer than 53 bits
            if abs(Fraction(float(rounded))) > abs(total):
                rounded = np.nextafter(rounded, np.float32(0))
            out[i, j] = rounded
    return out


def test_hardware_numerics_follow_the_alignment_model():
    with use(numerics="hardware"):
        parameters = (cutlass.BFloat16.__name__, 8, 64, [])
        function = compiled(
            lambda: Product(cutlass.BFloat16, 8, 64),
            parameters,
            lambda: (fake(cutlass.BFloat16), fake(cutlass.BFloat16), fake(cutlass.Float32)),
            "sm_90a",
        )
        g = torch.Generator().manual_seed(2)
        a, b = (
            (torch.randn(r, 64, generator=g) * torch.exp2(torch.randint(-9, 9, (r, 64), generator=g))).bfloat16()
            for r in (64, 8)
        )
        d = torch.zeros(64, 8)
        function(a, b, d, tensors={})
    wanted = model(a.float().numpy(), b.float().numpy(), np.zeros((64, 8), np.float32), 16, 25)
    np.testing.assert_array_equal(d.numpy(), wanted)
