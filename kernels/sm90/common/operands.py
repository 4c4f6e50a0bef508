"""Matrix operands of consumer warpgroups whose rows are rows of Q: S, P and O in registers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.sm90.common.attend import WarpgroupPlace
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma


@device_struct
class RowOperands:
    """S, P and O of query rows in registers, for any matrix instruction. Accumulators and A operands of wgmma and of
    mma.sync hold the same elements of a warp's rows."""

    s: Any
    o: Any
    p: Any
    dtype: Any
    tile_n: int
    depth_qk: int
    depth_v: int

    def begin(self, q_stage, tile, n) -> None:
        """Prepare for work tile ``tile``: Q has arrived and some keys are visible, beginning with tile ``n``."""

    def wait(self, pending: int) -> None:
        """Wait until at most ``pending`` of the issued products are in flight."""
        raise NotImplementedError

    def scores(self) -> RowFragment:
        return RowFragment(self.s, self.tile_n // RowFragment.lanes_per_row)

    def output(self) -> RowFragment:
        return RowFragment(self.o, self.depth_v // RowFragment.lanes_per_row)

    @cute.jit
    def round_scores(self) -> None:
        """Round S to P in 16 bits. Accumulator and A operand hold the same elements in the same order."""
        words = cute.recast_tensor(self.p, Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = copy.pack_x2(self.dtype, self.s[2 * i], self.s[2 * i + 1])

    def rescale(self, softmax) -> None:
        """Rescale O to the references that the latest step has chosen."""
        softmax.rescale_output(self.output())

    def add_values(self, v_stage, softmax) -> None:
        """Add P V of a stage to O; the product may still be in flight on return."""
        self.issue_pv(v_stage)


@dataclass
class Operands(RowOperands):
    """Matrix operands of one consumer warpgroup: Q, K, V in shared memory; S, O, P in registers."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: Any
    v: Any

    @staticmethod
    def create(kernel, tiles: SharedTiles, place: WarpgroupPlace, addresses, geometry) -> "Operands":
        row_block, column_half = place.row_block, place.column_half
        value = tiles.v
        if const_expr(kernel.config.v_splits > 1):
            part = cute.crd2idx((0, kernel.layout.depth[1], 0), tiles.v.layout)
            value = cute.make_tensor(tiles.v.iterator + column_half * part, tiles.v.layout)
        return Operands.of_value(kernel, tiles, row_block, value, kernel.layout.operand_columns[1])

    @staticmethod
    def of_value(kernel, tiles: SharedTiles, row_block, value, columns: int) -> "Operands":
        """Return operands with ``value``, a tile of ``columns`` columns; only its first columns are multiplied."""
        t, source = kernel.tile, warpgroup.OperandSource
        mma = partial(make_mma, kernel.dtype, warpgroups=kernel.config.consumer_warpgroups // kernel.config.v_splits)
        qk_mma = mma((WARPGROUP_ROWS, t.n), a_source=source.SMEM, b_major=OperandMajorMode.K)
        pv_mma = mma((WARPGROUP_ROWS, kernel.layout.product_columns), a_source=source.RMEM, b_major=OperandMajorMode.MN)
        v_layout = cute.make_layout((kernel.layout.depth[1], t.n, t.kv_stages), stride=(t.n, 1, t.n * columns))
        return Operands(**Operands.fields(kernel, tiles, row_block, (qk_mma, pv_mma), value, v_layout))

    @staticmethod
    def fields(kernel, tiles: SharedTiles, row_block, mmas: tuple, value, v_layout=None) -> dict[str, Any]:
        """Return the values of all fields by name, for the ``mmas`` of Q K^T and P V. ``value`` is V as operand B,
        under ``v_layout`` if that is given."""
        t, (depth_qk, depth_v), (qk_mma, pv_mma) = kernel.tile, kernel.layout.depth, mmas
        qk, pv = qk_mma.get_slice(row_block * WARPGROUP), pv_mma.get_slice(row_block * WARPGROUP)
        if const_expr(v_layout is not None):
            value = cute.composition(value, v_layout)
        return dict(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_A(qk.partition_A(tiles.q)),
            k=qk.make_fragment_B(qk.partition_B(tiles.k)),
            v=pv.make_fragment_B(pv.partition_B(value)),
            s=cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.n)), Float32),
            o=cute.make_rmem_tensor(pv.partition_shape_C((t.m, depth_v)), Float32),
            p=pv.make_fragment_A(pv.partition_shape_A((t.m, t.n))),
            dtype=kernel.dtype,
            tile_n=t.n,
            depth_qk=depth_qk,
            depth_v=depth_v,
        )

    def issue_qk(self, q_stage, k_stage) -> None:
        q, k = self.q[None, None, None, q_stage], self.k[None, None, None, k_stage]
        issue_mma(self.qk_mma, self.s, q, k, self.depth_qk, False)

    def issue_pv(self, v_stage) -> None:
        issue_mma(self.pv_mma, self.o, self.p, self.v[None, None, None, v_stage], self.tile_n, True)

    def wait(self, pending: int) -> None:
        warpgroup.wait_group(pending)
