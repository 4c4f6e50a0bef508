"""Small things every device part needs: structs that survive the DSL's loops, and access through raw addresses."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.hardware import WARPS


class DeviceStruct:
    """Base of dataclasses that hold traced values.

    The DSL carries an object through a traced loop or branch only if it can take the object apart into values and put
    it together again. Fields without traced values (tile sizes, dtypes, other configuration) stay as they are.
    """

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for f in fields(self) for value in _traced_values(getattr(self, f.name))]

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        rest, changed = list(values), {}
        for f in fields(self):
            old = getattr(self, f.name)
            count = len(_traced_values(old))
            if count:
                changed[f.name] = cutlass.new_from_mlir_values(old, rest[:count])
                rest = rest[count:]
        return replace(self, **changed)


def _traced_values(field: Any) -> list[Any]:
    # A dtype is a class whose instances, not itself, hold a value.
    return [] if isinstance(field, type) else cutlass.extract_mlir_values(field)


def global_pointer(dtype, address, align_bytes=None):
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align_bytes or dtype.width // 8)


def global_array(dtype, address):
    """Return the elements at a raw device address, indexed with 32- or 64-bit integers."""
    return cute.make_tensor(global_pointer(dtype, address), cute.make_layout(1 << 30))


def shared_array(dtype, address):
    """Return the elements at a shared-memory address."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1 << 16))


def shared_address(pointer):
    """Return a shared-memory pointer as the 32-bit address that PTX instructions take."""
    return pointer.toint().to(Int32)


def warp_in_warpgroup():
    """Return which warp of its warpgroup this one is, the same for all of its lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS


@dsl_user_op
def barrier_of_branches(barrier_id: int, threads: int, *, loc=None, ip=None) -> None:
    """Wait at a named barrier of ``threads`` threads, whose warps may wait at different instructions. That of
    ``cute.arch.barrier`` is aligned: all who wait for it have to be at one instruction."""
    number, count = (Int32(value).ir_value(loc=loc, ip=ip) for value in (barrier_id, threads))
    nvvm.barrier_cta_sync(number, thread_count=count, aligned=False, loc=loc, ip=ip)


@dsl_user_op
def barrier_all(condition, barrier_id, threads, *, loc=None, ip=None):
    """Wait at a named barrier of ``threads`` threads, and tell whether ``condition`` held in all of them."""
    held = cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.pred q, {$r1}, {$r2}, p; "
        "selp.b32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[condition.to(Int32), Int32(barrier_id), Int32(threads)],
        loc=loc,
        ip=ip,
    )
    return held != 0


@dsl_user_op
def tied(value, other, *, loc=None, ip=None):
    """Return ``value``, of which the compiler believes that it depends on ``other``: what is read at an address that
    changes with the steps of a loop is not kept in registers from one step to the next."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 unused; mov.b32 unused, {$r1}; mov.b32 {$w0}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[value, other],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def prmt(first, second, select: int, *, loc=None, ip=None):
    """Return four of the eight bytes of two words, picked by the digits of ``select`` from the lowest on."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {select:#06x};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def selected(first, second, select, *, loc=None, ip=None):
    """Return four of the eight bytes of two words, as :func:`prmt` picks them, where a register says which."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[first, second, select],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """Return a b + c rounded once. Of ``a * b + c * d`` the compiler may round either product, and decides anew
    wherever code is inlined; this leaves it no choice."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def one_when_known(a, b, c, d, *, loc=None, ip=None):
    """Return the Int32 1, which depends on four floats: no number exceeds infinity, but the compiler does not see that,
    and keeps what uses the 1 behind what computes them."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 x, y;\nmax.f32 x, {$r0}, {$r1};\nmax.f32 y, {$r2}, {$r3};\nmax.f32 x, x, y;\n"
        "setp.gt.f32 p, x, 0f7F800000;\nselp.s32 {$w0}, 0, 1, p;\n}",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
        loc=loc,
        ip=ip,
    )


def load_relaxed(address):
    """Load an Int32 that other SMs write to global memory; a fence behind it shows what they released with it."""
    return _load_ordered("relaxed", address)


def load_acquire(address):
    """Load an Int32 that other SMs write to global memory, and see what they released with it."""
    return _load_ordered("acquire", address)


@dsl_user_op
def _load_ordered(order: str, address, *, loc=None, ip=None):
    return cute.arch.inline_ptx(
        f"ld.{order}.gpu.global.b32 {{$w0}}, [{{$r0}}];",
        write_only_types=[Int32],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_release(address, value, *, loc=None, ip=None) -> None:
    """Store an Int32 in global memory, for whoever acquires it to see all that came before."""
    cute.arch.inline_ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@cute.jit
def load_int(address, index, default):
    """Int32 at ``address[index]``; ``default`` where no array was given (address 0)."""
    value = Int32(default)
    if address != 0:
        value = load_index(address, index)
    return value


def load_index(address, index):
    """Load entry ``index`` of lengths, offsets or a table. At an odd address it is the lower half of a 64-bit one."""
    is_wide = address & 1
    return global_array(Int32, address - is_wide)[index << is_wide.to(Int32)]


@cute.jit
def load_wide_index(address, index):
    """Load an entry of indices as an Int64. At an odd address they are int64, else int32."""
    value = Int64(0)
    if address & 1 != 0:
        value = global_array(Int64, address - 1)[index]
    else:
        value = global_array(Int32, address)[index].to(Int64)
    return value


@cute.jit
def load_sink(address, head):
    """Load the sink of a head as float32, or return -inf without sinks. At an odd address they are bfloat16."""
    sink = -Float32.inf
    if address != 0:
        if address & 1 != 0:
            sink = global_array(BFloat16, address - 1)[head].to(Float32)
        else:
            sink = global_array(Float32, address)[head]
    return sink


@cute.jit
def load_float(address, index, default):
    """Float32 at ``address[index]``; ``default`` where no array was given (address 0)."""
    value = Float32(default)
    if address != 0:
        value = global_array(Float32, address)[index]
    return value


def load_scale(address, value):
    """Return a scale that is a kernel argument times one float32 in device memory, if there is one."""
    return load_float(address, 0, 1.0) * value


@cute.jit
def load_output_scale(addresses, value):
    """Load the scale of the output. It is NaN where that of scores, on the device, is negative: results would be wrong,
    as the softmax rests on a row's largest score, which is not the largest logit then."""
    scale = load_scale(addresses.output_scale, value)
    if load_float(addresses.softmax_scale, 0, 0.0) < 0.0:
        scale = Float32(math.nan)
    return scale


def from_lane(values: Any, lane) -> Any:
    """Return a struct of Int32 as another lane has it."""
    return type(values)(*[cute.arch.shuffle_sync(Int32(v), lane) for v in cutlass.extract_mlir_values(values)])


def bit_length(value):
    """Return what Python's ``bit_length`` returns, of an Int32 that is not negative."""
    return 32 - cute.arch.clz(value).to(Int32)


def quotient(number, divisor):
    """Divide Int32 that are not negative, in fewer instructions than signed ones."""
    return (number.to(Uint32) // divisor.to(Uint32)).to(Int32)


@dataclass(frozen=True)
class Divisor(DeviceStruct):
    """A positive Int32 that is known before the numbers which it divides, so that most of a division is done by the
    time that they come."""

    value: Int32
    reciprocal: Uint32  # (2^32 - 1) / value, rounded down

    @staticmethod
    def of(value) -> "Divisor":
        reciprocal = Uint32(0xFFFFFFFF) // value.to(Uint32)
        # Otherwise the compiler moves the division to where its result is needed.
        return Divisor(value, tied(reciprocal.to(Int32), value).to(Uint32))

    def divide(self, number):
        """Return the quotient of an Int32 that is not negative. The product's upper half is the quotient or one less,
        because number * (2^32 / value - reciprocal) is at most 2^31."""
        quotient = (number.to(Uint64) * self.reciprocal.to(Uint64) >> Uint64(32)).to(Int32)
        return quotient + (number - quotient * self.value >= self.value).to(Int32)


def trailing_zeros(value):
    """Return how many zero bits an Int32 that is not 0 ends with."""
    return 31 - cute.arch.clz(value & -value).to(Int32)


@cute.jit
def running_sum(value):
    """Return the sum over this lane and all lanes before it."""
    lane = cute.arch.lane_idx()
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << k, mask_and_clamp=0)
        value += below if lane >= (1 << k) else Int32(0)
    return value
