"""The location of one request's tokens, from device-side offsets and lengths."""

import cutlass
from cutlass import Int32, Uint32

from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core.device import device_struct, load_int


@device_struct
class Request:
    index: Int32
    q_start: Int32  # first row of the request in query
    o_start: Int32
    k_start: Int32  # first row in contiguous K; 0 for paged K
    v_start: Int32
    lse_start: Int32
    q_len: Int32
    kv_len: Int32

    @staticmethod
    def of_lengths(index, q_start, q_len, kv_len) -> "Request":
        """Return a decode request: its output begins at the same row as its queries, and K and V are paged."""
        return Request(index, q_start, q_start, Int32(0), Int32(0), q_start, q_len, kv_len)

    @property
    def first_position(self):
        """Absolute key position of query row 0 (bottom-right alignment); negative if kv_len < q_len."""
        return self.kv_len - self.q_len


def _tokens(offset, token_elements):
    """Convert an offset in elements to a row number. The division is unsigned: uint32 offsets use all 32 bits."""
    return (offset.to(Uint32) // Uint32(token_elements)).to(Int32)


def load_request(index, addresses: Addresses, geometry: Geometry) -> Request:
    a, g = addresses, geometry
    q_start = _tokens(load_int(a.q_offsets, index, 0), g.q_token_elements)
    q_end = _tokens(load_int(a.q_offsets, index + (a.q_lens == 0).to(Int32), 0), g.q_token_elements)
    k_start = _tokens(load_int(a.k_offsets, index, 0), g.k_token_elements)
    k_end = _tokens(load_int(a.k_offsets, index + (a.kv_lens == 0).to(Int32), 0), g.k_token_elements)
    o_start = _tokens(load_int(a.o_offsets, index, q_start * Int32(g.o_token_elements)), g.o_token_elements)
    rows_left = Int32(g.tokens) - cutlass.max(q_start, o_start)  # in Q and the output, which end with the same token
    lse_request = Int32(g.lse_request)
    lse_row = index * cutlass.max(lse_request, 0) + o_start * (lse_request < 0).to(Int32)
    return Request(
        index=index,
        q_start=q_start,
        o_start=o_start,
        k_start=k_start,
        v_start=_tokens(load_int(a.v_offsets, index, k_start * Int32(g.v_token_elements)), g.v_token_elements),
        lse_start=_tokens(load_int(a.lse_offsets, index, lse_row * Int32(g.lse_token_elements)), g.lse_token_elements),
        q_len=cutlass.min(load_int(a.q_lens, index, q_end - q_start), rows_left),
        kv_len=cutlass.min(load_int(a.kv_lens, index, k_end - k_start), Int32(g.capacity)),
    )
