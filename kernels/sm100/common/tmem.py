"""Tensor memory: 128 lanes by 512 columns of 32 bits. A warp can access the 32 lanes of its rank in its warpgroup.

An address has the lane in its upper and the column in its lower 16 bits.
"""

import functools
from collections.abc import Iterator, Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16

from hopwell.kernels.config.base import power_of_two_in
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.device import ptx
from hopwell.kernels.parts.core.fragment import LaneRow, RowFragment
from hopwell.kernels.sm100.common.resources import TENSOR_MEMORY_COLUMNS

LANE_SHIFT = 16  # of the lane in an address
COLUMNS_AT_ONCE = 16  # processed by a thread: with 32, roles of 56 and 96 registers spill more
MOST_COLUMNS = 32  # of a load: kernels with 768 threads have no registers for 64


def allocate(slot, ctas: int = 1, columns: Sequence[int] = (TENSOR_MEMORY_COLUMNS,)) -> None:
    """Make an allocation of each number of ``columns``, and write their addresses to shared memory, from ``slot`` on. A
    whole warp calls this. With a pair of CTAs, both call it once both run: the PTX ISA asks the issuing warp to make
    sure of that."""
    text = "".join(
        f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [{{$r0}} + {4 * i}], {count}; "
        for i, count in enumerate(columns)
    )
    ptx(text + f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;", slot)


def free(address, ctas: int = 1, columns: int = TENSOR_MEMORY_COLUMNS) -> None:
    """Free an allocation of ``columns`` columns. The warp that has allocated them calls this."""
    ptx(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 {{$r0}}, {columns};", address)


def row_address(tensor_memory, column) -> Int32:
    """Return the address of column ``column`` in the lanes of this warp."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
    return tensor_memory + (warp * LANES << LANE_SHIFT) + column


def load_row(address, columns: int = COLUMNS_AT_ONCE) -> LaneRow:
    """Load ``columns`` columns of a lane's row, starting at ``address``."""
    row = LaneRow(cute.make_rmem_tensor(columns, Float32), columns)
    load(address, row)
    return row


def load(address, row: LaneRow) -> None:
    """Load the columns of ``row``, starting at ``address``."""
    for c, value in enumerate(_load(address, row.columns)):
        row.set(0, c, value)


def load_row_with_maximum(address, columns: int):
    """Load ``columns`` columns of a lane's row, and return them with the largest value. NaN is ignored. sm_103a alone
    has the instruction."""
    row = LaneRow(cute.make_rmem_tensor(columns, Float32), columns)
    values = _load(address, columns, with_maximum=True)
    for c in range(columns):
        row.set(0, c, values[c])
    return row, functools.reduce(cute.arch.fmax, values[columns:])


def _loads(columns: int) -> Iterator[tuple[int, int]]:
    """Yield the first column and the number of columns of each load: powers of two."""
    first = 0
    while first < columns:
        count = power_of_two_in(min(columns - first, MOST_COLUMNS))
        yield first, count
        first += count


def _load(address, columns: int, with_maximum: bool = False):
    """Return the values of the columns, and with ``with_maximum`` then the largest value of each load."""
    # One asm block holds the loads and the wait for them. Otherwise the compiler could use the values before they
    # arrive.
    text, loads = "", [*_loads(columns)]
    for i, (first, count) in enumerate(loads):
        outputs = "{" + ", ".join(f"{{$w{first + c}}}" for c in range(count)) + "}"
        form, kind = ("ld.red", "max.f32") if with_maximum else ("ld", "b32")
        outputs += f", {{$w{columns + i}}}" if with_maximum else ""
        text += f"tcgen05.{form}.sync.aligned.32x32b.x{count}.{kind} {outputs}, [{{$r0}} + {first}]; "
    results = [Float32] * (columns + len(loads) * with_maximum)
    return ptx(text + "tcgen05.wait::ld.sync.aligned;", address, results=results)


def load_rows(address, rows: RowFragment) -> None:
    """Load the columns of 16 rows, starting at ``address``, in the layout of wgmma's accumulators."""
    for i, value in enumerate(load_tile(address, rows.columns * rows.lanes_per_row)):
        rows.registers[i] = value


def load_tile(address, columns: int, offsets: Sequence[int] = (0,)):
    """Load ``columns`` columns of 16 rows, starting at each of ``offsets`` from ``address``. Return a lane's values, in
    the order of wgmma's accumulators."""
    text, loaded = "", 0
    for offset in offsets:
        for first, count in _loads(columns):
            outputs = ", ".join(f"{{$w{loaded + c}}}" for c in range(count // 2))
            text += f"tcgen05.ld.sync.aligned.16x256b.x{count // 8}.b32 {{{outputs}}}, [{{$r0}} + {offset + first}]; "
            loaded += count // 2
    return ptx(text + "tcgen05.wait::ld.sync.aligned;", address, results=[Float32] * loaded)


def store_words(address, words) -> None:
    """Store 32-bit values to a lane's columns, starting at ``address``. Call :func:`wait_stores` before another thread
    reads them."""
    _store(address, words, f"32x32b.x{len(words)}")


def store_zeros(address, words: int) -> None:
    """Store ``words`` zeros to a lane's columns, starting at ``address``."""
    zero = ptx("mov.b32 {$w0}, 0;", results=[Int32])  # the instruction takes no constants
    for first in range(0, words, COLUMNS_AT_ONCE):
        store_words(address + first, [zero] * min(COLUMNS_AT_ONCE, words - first))


def store_tile(address, words) -> None:
    """Store 16 rows of 32-bit values, starting at ``address``, from registers in the order of wgmma's operand A. A
    lane has two values of each four columns. Call :func:`wait_stores` before another thread reads them."""
    count, first = cute.size(words), 0
    while first < count:
        part = power_of_two_in(count - first)
        _store(address + 2 * first, [words[first + i] for i in range(part)], f"16x128b.x{part // 2}")
        first += part


def _store(address, words, shape: str) -> None:
    operands = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
    ptx(f"tcgen05.st.sync.aligned.{shape}.b32 [{{$r0}}], {{{operands}}};", address, *words)


def wait_stores() -> None:
    ptx("tcgen05.wait::st.sync.aligned;")


def before_signal() -> None:
    """Order this thread's accesses before the barrier that it arrives at next."""
    ptx("tcgen05.fence::before_thread_sync;")


def after_signal() -> None:
    """Order this thread's later accesses and products after the barrier that it has waited for."""
    ptx("tcgen05.fence::after_thread_sync;")


def commit(barrier, ctas: int = 1, mask=None) -> None:
    """Arrive at ``barrier`` once all products that this thread has issued are done. With ``mask``, arrive at the same
    place in the CTAs of the cluster whose bits are set."""
    form, operand = (".multicast::cluster", ", {$r1}") if mask is not None else ("", "")
    ptx(
        f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{form}.b64 [{{$r0}}]{operand};",
        barrier,
        *([] if mask is None else [Uint16(mask)]),
    )
