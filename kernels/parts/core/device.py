"""Device-side basics: structs that survive the DSL's loops, access through raw addresses, and inline PTX."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar, overload

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.hardware import WARPS

_T = TypeVar("_T")


@overload
def device_struct(cls: type[_T]) -> type[_T]: ...
@overload
def device_struct(*, frozen: bool) -> Callable[[type[_T]], type[_T]]: ...
def device_struct(cls: Any = None, *, frozen: bool = False) -> Any:
    """Make a class, and its subclasses, dataclasses that hold traced values.

    The DSL carries an object through a traced loop or branch only if it can split the object into values and rebuild
    it. Fields without traced values (tile sizes, dtypes, other configuration) are unchanged. A subclass with fields of
    its own is an ordinary dataclass.
    """
    if cls is None:
        return partial(device_struct, frozen=frozen)
    struct = dataclass(frozen=frozen)(cls)
    struct.__extract_mlir_values__ = _extract
    struct.__new_from_mlir_values__ = _rebuild
    return struct


def _extract(struct: Any) -> list[Any]:
    return [value for f in fields(struct) for value in _traced_values(getattr(struct, f.name))]


def _rebuild(struct: Any, values: list[Any]) -> Any:
    rest, changed = list(values), {}
    for f in fields(struct):
        old = getattr(struct, f.name)
        count = len(_traced_values(old))
        if count:
            changed[f.name] = cutlass.new_from_mlir_values(old, rest[:count])
            rest = rest[count:]
    return replace(struct, **changed)


def _traced_values(field: Any) -> list[Any]:
    # A dtype is a class: its instances hold a value, the class itself does not.
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
    """Return the index of this warp in its warpgroup, as a warp-uniform value."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS


@dsl_user_op
def barrier_of_branches(barrier_id: int, threads: int, *, loc=None, ip=None) -> None:
    """Wait at a named barrier of ``threads`` threads, whose warps may wait at different instructions.

    The barrier of ``cute.arch.barrier`` is aligned: all waiting threads have to be at the same instruction.
    """
    number, count = (Int32(value).ir_value(loc=loc, ip=ip) for value in (barrier_id, threads))
    nvvm.barrier_cta_sync(number, thread_count=count, aligned=False, loc=loc, ip=ip)


def barrier_all(condition, barrier_id, threads):
    """Wait at a named barrier of ``threads`` threads, and return whether ``condition`` held in all of them."""
    held = ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.pred q, {$r1}, {$r2}, p; "
        "selp.b32 {$w0}, 1, 0, q; }",
        condition.to(Int32),
        Int32(barrier_id),
        Int32(threads),
        results=[Int32],
    )
    return held != 0


def tied(value, other):
    """Return ``value`` with an artificial dependence on ``other``.

    If an address depends on the step of a loop, the compiler does not keep loaded values in registers between steps.
    """
    return ptx("{ .reg .b32 unused; mov.b32 unused, {$r1}; mov.b32 {$w0}, {$r0}; }", value, other, results=[Int32])


def prmt(first, second, select: int):
    """Return four of the eight bytes of two words, selected by the hex digits of ``select`` from the lowest on."""
    return ptx(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {select:#06x};", first, second, results=[Uint32])


def selected(first, second, select):
    """Return four of the eight bytes of two words, as :func:`prmt` does, with a selector in a register."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", first, second, select, results=[Uint32])


def fma(a, b, c):
    """Return a b + c rounded once.

    For ``a * b + c * d`` the compiler may round either product, and it decides anew wherever code is inlined. An
    explicit fma leaves it no choice.
    """
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c, results=[Float32])


def one_when_known(a, b, c, d):
    """Return the Int32 1, with a dependence on four floats.

    No number exceeds infinity, so the result is always 1. The compiler does not see that, so it keeps code that uses
    the 1 after the code that computes the floats.
    """
    return ptx(
        "{\n.reg .pred p;\n.reg .f32 x, y;\nmax.f32 x, {$r0}, {$r1};\nmax.f32 y, {$r2}, {$r3};\nmax.f32 x, x, y;\n"
        "setp.gt.f32 p, x, 0f7F800000;\nselp.s32 {$w0}, 0, 1, p;\n}",
        a,
        b,
        c,
        d,
        results=[Int32],
    )


def load_relaxed(address):
    """Load an Int32 that other SMs write to global memory. A later fence makes the data released with it visible."""
    return _load_ordered("relaxed", address)


def load_acquire(address):
    """Load an Int32 that other SMs write to global memory. Data released with it is visible."""
    return _load_ordered("acquire", address)


def _load_ordered(order: str, address):
    return ptx(f"ld.{order}.gpu.global.b32 {{$w0}}, [{{$r0}}];", address, results=[Int32])


def store_release(address, value) -> None:
    """Store an Int32 to global memory. A thread that acquires it sees all earlier writes."""
    ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", address, value)


@cute.jit
def load_int(address, index, default):
    """Return the Int32 at ``address[index]``, or ``default`` if there is no array (address 0)."""
    value = Int32(default)
    if address != 0:
        value = load_index(address, index)
    return value


def load_index(address, index):
    """Load entry ``index`` of lengths, offsets or a table. An odd address marks int64 entries; the low half is read."""
    is_wide = address & 1
    return global_array(Int32, address - is_wide)[index << is_wide.to(Int32)]


@cute.jit
def load_wide_index(address, index):
    """Load an entry of indices as an Int64. An odd address marks int64 entries, an even one int32."""
    value = Int64(0)
    if address & 1 != 0:
        value = global_array(Int64, address - 1)[index]
    else:
        value = global_array(Int32, address)[index].to(Int64)
    return value


@cute.jit
def load_sink(address, head):
    """Load the sink of a head as float32, or return -inf without sinks. An odd address marks bfloat16 sinks."""
    sink = -Float32.inf
    if address != 0:
        if address & 1 != 0:
            sink = global_array(BFloat16, address - 1)[head].to(Float32)
        else:
            sink = global_array(Float32, address)[head]
    return sink


@cute.jit
def load_float(address, index, default):
    """Return the Float32 at ``address[index]``, or ``default`` if there is no array (address 0)."""
    value = Float32(default)
    if address != 0:
        value = global_array(Float32, address)[index]
    return value


def load_scale(address, value):
    """Return a scale: a kernel argument, times one float32 in device memory if there is one."""
    return load_float(address, 0, 1.0) * value


@cute.jit
def load_output_scale(addresses, value):
    """Load the output scale of all heads, see :func:`checked_scale`."""
    return checked_scale(
        load_float(addresses.output_scale, 0, 1.0) * value, load_float(addresses.softmax_scale, 0, 0.0)
    )


@cute.jit
def checked_scale(scale, softmax_scale):
    """Return the output scale, or NaN if the softmax scale on the device is negative or NaN.

    The softmax would replace either by a very small scale. With a negative scale a row's largest score, on which it
    relies, would not be the largest logit.
    """
    return scale if softmax_scale >= 0.0 else Float32(math.nan)


def from_lane(values: Any, lane) -> Any:
    """Return a struct of Int32 with the values of another lane."""
    return type(values)(*[cute.arch.shuffle_sync(Int32(v), lane) for v in cutlass.extract_mlir_values(values)])


def bit_length(value):
    """Return Python's ``bit_length`` of a non-negative Int32."""
    return 32 - cute.arch.clz(value).to(Int32)


def quotient(number, divisor):
    """Divide non-negative Int32 values, in fewer instructions than a signed division."""
    return (number.to(Uint32) // divisor.to(Uint32)).to(Int32)


@device_struct(frozen=True)
class Divisor:
    """A positive Int32 divisor that is known before the dividends.

    Most of the division is done by the time the dividends arrive.
    """

    value: Int32
    reciprocal: Uint32  # (2^32 - 1) / value, rounded down

    @staticmethod
    def of(value) -> "Divisor":
        reciprocal = Uint32(0xFFFFFFFF) // value.to(Uint32)
        # Without this tie the compiler moves the division to the use of its result.
        return Divisor(value, tied(reciprocal.to(Int32), value).to(Uint32))

    def divide(self, number):
        """Return the quotient of a non-negative Int32.

        The upper half of the product is the quotient or one less, because number * (2^32 / value - reciprocal) is at
        most 2^31.
        """
        quotient = (number.to(Uint64) * self.reciprocal.to(Uint64) >> Uint64(32)).to(Int32)
        return quotient + (number - quotient * self.value >= self.value).to(Int32)


def trailing_zeros(value):
    """Return the number of trailing zero bits of a nonzero Int32."""
    return 31 - cute.arch.clz(value & -value).to(Int32)


@cute.jit
def running_sum(value):
    """Return the sum over this lane and all lanes before it."""
    lane = cute.arch.lane_idx()
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << k, mask_and_clamp=0)
        value += below if lane >= (1 << k) else Int32(0)
    return value


@dsl_user_op
def ptx(text: str, *operands, results=(), loc=None, ip=None):
    """Issue the instructions of ``text``. Return the result, or a tuple of several, of the types ``results``.

    The text names operands {$r0}, {$r1} and so on, and results {$w0}, {$w1} and so on.
    """
    return cute.arch.inline_ptx(text, write_only_types=[*results], read_only_args=[*operands], loc=loc, ip=ip)
