"""Warpgroup MMA: tiled operations and their asynchronous issue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.base import MMA_DEPTH

WARPGROUP_ROWS = 64  # rows of the M dimension that one wgmma computes


def make_mma(dtype, shape_mn, a_source, b_major, *, warpgroups: int, a_major=OperandMajorMode.K):
    if dtype.width == 8:
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, (*shape_mn, 2 * MMA_DEPTH), a_source, a_major, b_major)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (*shape_mn, MMA_DEPTH), a_source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))


def make_transposed_mmas(dtype, rows: int) -> tuple:
    """Return the MMAs of S^T = K Q^T and O^T = V^T P^T for ``rows`` rows of Q, with all operands in shared memory."""
    common = dict(a_source=warpgroup.OperandSource.SMEM, b_major=OperandMajorMode.K, warpgroups=1)
    shape = (WARPGROUP_ROWS, rows)
    return make_mma(dtype, shape, **common), make_mma(dtype, shape, a_major=OperandMajorMode.MN, **common)


@cute.jit
def issue_mma(
    mma,
    accumulator,
    a,
    b,
    depth: cutlass.Constexpr[int],
    accumulate: cutlass.Constexpr[bool],
    first: cutlass.Constexpr[tuple[int, int]] = (0, 0),
) -> None:
    """Issue accumulator (+)= a b over ``depth`` elements, and commit it as one wgmma group. The product begins at
    elements ``first`` of ``a`` and of ``b``. The call returns at once."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    at_once = mma.op.shape_mnk[2]
    a_first, b_first = (each // at_once for each in first)
    for k in cutlass.range_constexpr(depth // at_once):
        cute.gemm(atom, accumulator, a[None, None, a_first + k], b[None, None, b_first + k], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
