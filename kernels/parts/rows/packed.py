"""Packed GQA rows of decode: the query heads of a KV head and the new tokens of a request share one tile.

Row r of a request and KV head is new token r // group and query head kv_head * group + r % group.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core.device import device_struct, global_array, load_sink
from hopwell.kernels.parts.rows.head_scales import output_scale_of
from hopwell.kernels.parts.rows.softmax import log_sum_exp, normalised


@device_struct
class PackedRows:
    """Output locations of the rows of one tile. Row r of the tile is valid for r < ``count``."""

    addresses: Addresses
    geometry: DecodeGeometry
    first_token: Int32  # first token of the request, in the output
    first_head: Int32
    first_row: Int32  # first row of the tile
    count: Int32
    scale: Float32  # output scale
    out_bytes: int  # bytes of an output element

    @staticmethod
    def create(a: Addresses, g: DecodeGeometry, tile, scale, out_bytes: int) -> "PackedRows":
        group = Int32(g.group)
        first = (tile.request.o_start, tile.kv_head * group, tile.first_row)
        return PackedRows(a, g, *first, tile.rows(group), output_scale_of(scale, a, tile), out_bytes)

    def up_to(self, most) -> "PackedRows":
        """Return at most ``most`` of these rows; a negative ``most`` gives none."""
        return replace(self, count=cutlass.max(cutlass.min(self.count, most), 0))

    def _place(self, row):
        """Return (token, head) of a row of the tile."""
        packed, group = self.first_row + row, Int32(self.geometry.group)
        token = packed // group
        return self.first_token + token, self.first_head + packed - token * group

    def query(self, row, q_start, element_bytes: int = HALFWORD_BYTES):
        """Return the address of a query row. The request's queries begin at token ``q_start``."""
        token, head = self._place(row)
        element = Int64(token - self.first_token + q_start) * self.geometry.q_token + head * self.geometry.q_head
        return self.addresses.query + element_bytes * element

    def output(self, row, column):
        """Return the address of an element of the output."""
        token, head = self._place(row)
        element = Int64(token) * self.geometry.o_token + head * self.geometry.o_head + column
        return self.addresses.out + element * self.out_bytes

    @cute.jit
    def finish(self, row, reference, total, writes):
        """Return the factor that turns a row's accumulated output into the result.

        The row's log-sum-exp is stored too if ``writes`` is set.
        """
        a, g = self.addresses, self.geometry
        token, head = self._place(row)
        factor, lse = normalised(reference, total, load_sink(a.sinks, head))
        if a.lse != 0 and writes:
            # Reading the sink again is cheaper than keeping it in a register: MLA kernels spilled 8 bytes.
            value = log_sum_exp(lse, load_sink(a.sinks, head), Int32(g.lse_natural))
            global_array(Float32, a.lse)[Int64(token) * g.lse_row + head * g.lse_head] = value
        return factor * self.scale
