"""Where one request's tokens are, read from the device-side offsets and lengths."""

from dataclasses import dataclass

from cutlass import Int32

from hopwell.kernels.launch import Addresses, Geometry
from hopwell.kernels.parts.device import DeviceStruct, load_int


@dataclass
class Request(DeviceStruct):
    index: Int32
    q_start: Int32  # first row of the request in query
    o_start: Int32
    k_start: Int32  # first row in contiguous K; 0 when paged
    v_start: Int32
    lse_start: Int32
    q_len: Int32
    kv_len: Int32

    @property
    def first_position(self):
        """Absolute key position of query row 0 (bottom-right alignment); negative when kv_len < q_len."""
        return self.kv_len - self.q_len


def load_request(index, addresses: Addresses, geometry: Geometry) -> Request:
    q_start = load_int(addresses.q_offsets, index, 0) // Int32(geometry.q_unit)
    q_end = load_int(addresses.q_offsets, index + (addresses.q_lens == 0).to(Int32), 0) // Int32(geometry.q_unit)
    k_start = load_int(addresses.k_offsets, index, 0) // Int32(geometry.k_unit)
    k_end = load_int(addresses.k_offsets, index + (addresses.kv_lens == 0).to(Int32), 0) // Int32(geometry.k_unit)
    o_start = load_int(addresses.o_offsets, index, q_start * Int32(geometry.o_unit)) // Int32(geometry.o_unit)
    lse_start = load_int(
        addresses.lse_offsets,
        index,
        (index * Int32(geometry.lse_request) + o_start * Int32(geometry.lse_ragged)) * Int32(geometry.lse_unit),
    ) // Int32(geometry.lse_unit)
    return Request(
        index=index,
        q_start=q_start,
        o_start=o_start,
        k_start=k_start,
        v_start=load_int(addresses.v_offsets, index, k_start * Int32(geometry.v_unit)) // Int32(geometry.v_unit),
        lse_start=lse_start,
        q_len=load_int(addresses.q_lens, index, q_end - q_start),
        kv_len=load_int(addresses.kv_lens, index, k_end - k_start),
    )
