"""tcgen05.mma: matrix products of sm_100's tensor cores. Operands are in shared or tensor memory, results in tensor
memory.

Placement of the rows of D, A and the scale factors: PTX ISA, "tcgen05 data path layout organization" and "scale factor
layout"; CUTLASS, mma_traits_sm100_frag.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode.mma import FORMAT
from ..decode.op import Context, Op, decodes, items
from ..errors import EmulatorError, MemoryFault, UninitializedRead, Unsupported
from ..machine.state import Cta, Warp, first_lane
from ..ptx import Imm, Instr, Mem, Vec
from .instruction_descriptor import K_BYTES, PACK_BYTE, PACK_CHUNK, PACK_TIGHT, Shape, parse_shape
from .tensor_memory import ALL_GROUPS, LANES, tensor_memory, touch
from .tensor_queue import group_ctas, queue_key, queue_mark, touch_chunks

if TYPE_CHECKING:
    from ..machine.machine import Machine

LANE_WORDS = 4
# First bit and mask of an element in its byte of tensor memory. See spread() of tensor_copy.py.
SUB_BYTE = {"e2m1": (2, 0xF), "e2m3": (0, 0x3F), "e3m2": (0, 0x3F)}
UNIT_TCGEN05 = 1


# ------------------------------------------------------------------ operands
def chunks(m: Machine, descriptor: int, mn: int, k_bytes: int, k_major: bool, half_bytes: int) -> np.ndarray:
    """Return chunk numbers of a shared-memory operand, [mn][k chunks] or [k][mn chunks]; see native/descriptor.c."""
    key = (descriptor, mn, k_bytes, k_major, half_bytes)
    found = _chunks.get(key)
    if found is None:
        out = np.empty(256 * 16, np.int32)
        n = m.core.core_chunks(descriptor, mn, k_bytes, k_major, half_bytes, 1, out.ctypes.data)
        if n < 0:
            raise Unsupported(f"matrix descriptor {descriptor:#x}: layout or base offset")
        rows = mn if k_major else k_bytes * 2 // half_bytes
        found = np.ascontiguousarray(out[:n].reshape(rows, -1))
        if len(_chunks) > 8192:
            _chunks.clear()
        _chunks[key] = found
    return found


_chunks: dict[tuple, np.ndarray] = {}


def gather(
    m: Machine, cta: Cta, index: np.ndarray, fmt: str, pack: int, shape: tuple[int, int], transpose: bool, where: str
):
    """Return an operand in shared memory as float32 [rows][k], or its transpose."""
    if int(index.max()) * 16 + 16 > cta.smem.size or int(index.min()) < 64:
        raise MemoryFault(f"operand outside of shared memory: {where}")
    if cta.init is not None and not cta.init[: cta.smem.size // 16 * 16].reshape(-1, 16)[index].all():
        raise UninitializedRead(f"operand in shared memory that was never written: {where}")
    out = np.empty(shape, np.float32)
    rows, per_row = index.shape
    m.core.core_gather(
        cta.smem_address, index.ctypes.data, rows, per_row, FORMAT[fmt], pack, out.ctypes.data, shape[1], int(transpose)
    )
    return out


def decode(m: Machine, raw: np.ndarray, fmt: str, n: int, pack: int) -> np.ndarray:
    """Return float32 [rows][n], decoded from rows of bytes that n elements fill."""
    raw = np.ascontiguousarray(raw)
    out = np.empty((raw.shape[0], n), np.float32)
    m.core.core_decode(raw.ctypes.data, out.size, FORMAT[fmt], pack, out.ctypes.data)
    return out


# ------------------------------------------------------------------ the instruction
@dataclass
class Mma:
    """Decoded tcgen05.mma; calling it issues one operation."""

    pc: int
    kind: str
    pair: bool
    d: Any
    a: Any  # address operand (tensor memory) or descriptor row
    a_in_tmem: bool
    b: int
    idesc: int
    accumulate: tuple[int, bool] | bool
    disabled: list[int]  # rows of the output-lane mask
    scale_input: int
    sf_a: Any = None
    sf_b: Any = None
    vector: int | None = None
    ws: bool = False
    target: str = ""

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> None:
        if mask & (mask - 1):
            raise EmulatorError(
                f"{w}: tcgen05.mma issued by {bin(mask).count('1')} lanes; it is a single-thread "
                f"instruction\n  {m.where(self.pc)}"
            )
        lane = first_lane(mask)
        ctas = group_ctas(w, self.pair)
        where = m.where(self.pc)
        idesc = w.get32(self.idesc, lane)
        shape = parse_shape(self.kind, idesc, len(ctas), self.vector, where, self.ws, self.a_in_tmem, self.target)
        if isinstance(self.accumulate, tuple):
            accumulate = bool((int(w.pred[self.accumulate[0]]) >> lane & 1) ^ self.accumulate[1])
        else:
            accumulate = self.accumulate
        job = Job(
            self,
            shape,
            ctas,
            self.d.of(w, lane),
            self.a.of(w, lane) if self.a_in_tmem else w.get64(self.a, lane),
            w.get64(self.b, lane),
            accumulate,
            [w.get32(row, lane) for row in self.disabled],
            self.sf_a.of(w, lane) if self.sf_a else 0,
            self.sf_b.of(w, lane) if self.sf_b else 0,
            where,
        )
        job.check_lanes()
        job.check_overlap()
        if m.tracked:
            job.track(m, w)
        m.add("matrix flops", 2 * shape.m * shape.n * shape.k)
        m.post(lambda: job.run(m), queue_key(ctas), f"tcgen05.mma: {where}", w.cta.cluster, self.pc)


@dataclass
class Job:
    """One issued operation with the values of its operands."""

    op: Mma
    shape: Shape
    ctas: list[Cta]
    d: int
    a: int
    b: int
    accumulate: bool
    disabled: list[int]
    sf_a: int
    sf_b: int
    where: str

    # -- where things lie
    def d_lanes(self) -> np.ndarray:
        s = self.shape
        return np.arange(128) if s.split > 1 else s.lanes()

    def d_columns(self) -> int:
        return self.shape.n // self.shape.split

    def a_chunks(self, m: Machine) -> np.ndarray:
        s = self.shape
        return chunks(m, self.a, s.rows, s.k_bytes, not s.a_mn, s.half_bytes)

    def b_chunks(self, m: Machine) -> np.ndarray:
        s = self.shape
        return chunks(m, self.b, s.n // s.ctas, s.k_bytes, not s.b_mn, s.half_bytes)

    def scale_columns(self, address: int, rows: int, first_byte: int) -> np.ndarray:
        """Return columns of scales, [word][rows / 32].

        A row's scales fill the bytes of a word from ``first_byte``, then the row's next word. It lies behind the first
        words of all rows, four columns for each 128 rows (CUTLASS, mma_traits_sm100_frag.hpp, tmem_sf_frg).
        """
        words = np.arange(-(-(first_byte + self.shape.scales) // 4))[:, None]
        return (address & 0xFFFF) + words * (4 * -(-rows // 128)) + np.arange(-(-rows // 32))

    def check_lanes(self) -> None:
        """PTX ISA, "data path layout organization": D and A start at lane 0, or both at lane 16 of layout F."""
        s, d = self.shape, self.d >> 16 & 0xFFFF
        half = s.uses_half_of_the_lanes
        a = self.a >> 16 & 0xFFFF if self.op.a_in_tmem else d
        if a != d or d not in ((0, 16) if half else (0,)):
            raise MemoryFault(
                f"tcgen05.mma of M = {s.m} with D at lane {d} and A at lane {a} of tensor memory: "
                f"{'lanes 0 and 16 are' if half else 'lane 0 is'} allowed, the same for both\n  {self.where}"
            )

    def check_overlap(self) -> None:
        """The instruction may not read A from columns that it writes."""
        if not self.op.a_in_tmem:
            return
        a, d, n = self.a & 0xFFFF, self.d & 0xFFFF, self.d_columns()
        if a < d + n and d < a + K_BYTES // 4:
            raise MemoryFault(
                f"tcgen05.mma writes D to columns {d}..{d + n - 1} of tensor memory and reads A from columns "
                f"{a}..{a + K_BYTES // 4 - 1}\n  {self.where}"
            )

    # -- detectors
    def track(self, m: Machine, w: Warp) -> None:
        s, pc = self.shape, self.op.pc
        mark = queue_mark(m, w, self.ctas, pc)
        # Lanes of D, and of A, which has a copy in each group of lanes: half of each quarter, or all.
        groups = 0x55 << (self.d >> 20 & 1) if s.uses_half_of_the_lanes else ALL_GROUPS
        for cta in self.ctas:
            tensor_memory(m, cta)
            touch_chunks(m, cta, self.b_chunks(m), mark, pc)
            if self.op.a_in_tmem:
                touch(m, cta, groups, [(self.a & 0xFFFF, K_BYTES // 4)], False, mark, pc)
            else:
                touch_chunks(m, cta, self.a_chunks(m), mark, pc)
            if s.scales:
                for base, rows, byte in ((self.sf_a, s.rows, s.a_byte), (self.sf_b, self.b_scale_rows(), s.b_byte)):
                    spans = [(int(words[0]), len(words)) for words in self.scale_columns(base, rows, byte)]
                    touch(m, cta, ALL_GROUPS, spans, False, mark, pc)
            touch(m, cta, groups, [(self.d & 0xFFFF, self.d_columns())], True, mark, pc)

    # -- execution
    def run(self, m: Machine) -> None:
        s = self.shape
        b = np.concatenate(
            [
                gather(m, c, self.b_chunks(m), s.b_type, s.pack, (s.k, s.n // s.ctas), not s.b_mn, self.where)
                for c in self.ctas
            ],
            axis=1,
        )
        for cta in self.ctas:
            a = self.operand_a(m, cta)
            if s.negate:
                a = -a
            scaled_b = b
            if s.scales:
                per = s.k // s.scales
                a = a * np.repeat(self.scales(m, cta, self.sf_a, s.rows, s.a_byte, 1), per, axis=1)
                halves = 2 if self.b_scale_rows() != s.n else 1
                scaled_b = b * np.repeat(self.scales(m, cta, self.sf_b, s.n, s.b_byte, halves), per, axis=1).T
            self.accumulate_into(m, cta, np.ascontiguousarray(a), np.ascontiguousarray(scaled_b))
        m.progress()

    def operand_a(self, m: Machine, cta: Cta) -> np.ndarray:
        s = self.shape
        if not self.op.a_in_tmem:
            return gather(m, cta, self.a_chunks(m), s.a_type, s.pack, (s.rows, s.k), s.a_mn, self.where)
        tm = tensor_memory(m, cta)
        column = self.a & 0xFFFF
        tm.check(m, column, K_BYTES // 4, self.where)
        lanes = (self.a >> 16 & 0xFFFF) + s.lanes()
        cells = tm.cells[lanes, column : column + K_BYTES // 4]
        if s.split > 1:
            # CUTLASS, UMMA::TmemAllocMode::Duplicated: with two column ranges, each lane half needs its own copy of A.
            for k in range(1, s.split):
                if (tm.cells[lanes + k * s.rows, column : column + K_BYTES // 4] != cells).any():
                    raise EmulatorError(
                        f"A in tensor memory differs between lane groups that must hold copies: {self.where}"
                    )
        if tm.written is not None and not tm.written[lanes, column : column + K_BYTES // 4].all():
            raise UninitializedRead(f"A in tensor memory that was never written: {self.where}")
        raw = np.ascontiguousarray(cells).view(np.uint8)
        if s.pack == PACK_CHUNK and s.a_type in SUB_BYTE:
            shift, mask = SUB_BYTE[s.a_type]
            raw = (raw >> shift & mask).astype(np.uint8)
        return decode(m, raw, s.a_type, s.k, PACK_BYTE if s.pack == PACK_CHUNK else s.pack)

    def b_scale_rows(self) -> int:
        """Rows of B whose scales one lane group holds.

        When D is split over two lane groups (M = 128 of two CTAs), each group holds the scales of its own columns
        (CUTLASS, UMMA::TmemAllocMode::ScaleFactorDuplicated2by2).
        """
        return self.shape.n // self.shape.split

    def scales(self, m: Machine, cta: Cta, address: int, rows: int, first_byte: int, halves: int) -> np.ndarray:
        """Return the scales of ``rows``, in bytes from ``first_byte``.

        Row r of a group is in lane r % 32 of each 32-lane quarter, at column base + r / 32.
        """
        tm, out = tensor_memory(m, cta), []
        columns = self.scale_columns(address, rows // halves, first_byte)
        tm.check(m, int(columns.min()), int(np.ptp(columns)) + 1, self.where)
        quarters = tm.cells[:, columns].reshape(4, 32, *columns.shape)
        for h in range(halves):
            group = quarters[4 // halves * h : 4 // halves * (h + 1)]
            if (group != group[0]).any():
                raise EmulatorError(
                    f"scale factors differ between the 32-lane quarters that must hold copies: {self.where}"
                )
            words = np.ascontiguousarray(group[0].transpose(2, 0, 1))  # [rows / 32][32][word]
            by_row = words.view(np.uint8).reshape(-1, 4 * len(columns))[: rows // halves]
            out.append(by_row[:, first_byte : first_byte + self.shape.scales])
        raw = np.ascontiguousarray(np.concatenate(out))
        return decode(m, raw, self.shape.scale_format, self.shape.scales, PACK_TIGHT)

    def accumulate_into(self, m: Machine, cta: Cta, a: np.ndarray, b: np.ndarray) -> None:
        s = self.shape
        tm = tensor_memory(m, cta)
        lane, column, width = self.d >> 16 & 0xFFFF, self.d & 0xFFFF, self.d_columns()
        tm.check(m, column, width, self.where)
        columns = slice(column, column + width)
        lanes: Any = lane + self.d_lanes() if s.uses_half_of_the_lanes else slice(0, LANES)
        old = tm.cells[lanes, columns]
        if self.accumulate and tm.written is not None and not tm.written[lanes, columns].all():
            raise UninitializedRead(f"accumulation onto tensor memory that was never written: {self.where}")
        if s.split > 1:  # put the column ranges side by side again
            old = np.concatenate(np.split(old, s.split), axis=1)
        acc = self.start(old)
        if s.d_type == "s32":
            product = np.zeros(acc.shape, np.float32)  # exact: sums of 32 products of 8-bit integers stay below 2^24
            m.core.core_gemm(product.ctypes.data, a.ctypes.data, b.ctypes.data, s.rows, s.n, s.k, s.k, s.n, s.n)
            total = acc.astype(np.int64) + product.astype(np.int64)
            total = np.clip(total, -(1 << 31), (1 << 31) - 1) if s.saturate else total
            result = total.astype(np.int32).view(np.uint32)
        else:
            m.core.core_product(
                m.address,
                acc.ctypes.data,
                a.ctypes.data,
                b.ctypes.data,
                s.rows,
                s.n,
                s.k,
                s.k,
                FORMAT["f32" if s.scales else s.a_type],  # scaled elements have exponents outside the format
                UNIT_TCGEN05,
            )
            # An f16 accumulator takes a whole 32-bit column; .pack::16b loads pack two of them.
            result = (
                acc.astype(np.float16).view(np.uint16).astype(np.uint32) if s.d_type == "f16" else acc.view(np.uint32)
            )
        if s.split > 1:
            result = np.concatenate(np.split(result, s.split, axis=1))
        if any(self.disabled):
            # The mask has a bit for each lane of tensor memory, not for each row (PTX ISA, "tcgen05.mma",
            # disable-output-lane). A CTA pair has 256 lanes, the number of rows of M = 256 (CUTLASS DSL,
            # nvvm_wrapper.py, write_disable_mask).
            bits = self.disabled[LANE_WORDS * (cta is not self.ctas[0]) :]
            all_lanes = lane + self.d_lanes()
            write = ~np.array([bits[k // 32] >> (k % 32) & 1 for k in all_lanes.tolist()], bool)
            lanes, result = all_lanes[write], result[write]
        tm.cells[lanes, columns] = result
        if tm.written is not None:
            tm.written[lanes, columns] = True

    def start(self, old: np.ndarray) -> np.ndarray:
        """Return the accumulator before the product, as a fresh array."""
        s = self.shape
        dtype: Any = np.int32 if s.d_type == "s32" else np.float32
        if not self.accumulate:
            return np.zeros(old.shape, dtype)
        if s.d_type == "f16":
            acc = old.astype(np.uint16).view(np.float16).astype(np.float32)
        else:
            acc = np.ascontiguousarray(old).view(dtype).copy()
        return acc * np.float32(2.0**-self.op.scale_input) if self.op.scale_input else acc


@decodes("tcgen05.mma")
def mma(c: Context, i: Instr) -> Op:
    from .operands import address_operand

    p = i.parts
    ws = "ws" in p
    if "sp" in p or any(x.startswith("ashift") for x in p):
        raise Unsupported(i.op)
    kind = next(x for x in p if x.startswith("kind::"))[6:]
    target = c.file.kernel.target
    if kind == "i8" and target.startswith("sm_103"):  # PTX ISA, "tcgen05.mma", target notes; ptxas refuses it
        raise Unsupported(f"{i.op} on {target}, which has no kind::i8")
    args = list(i.args)
    a_in_tmem = isinstance(args[1], Mem)
    scaled = "block_scale" in p
    vector = next((int(x[5:]) for x in p if x.startswith("block") and x[5:].isdigit()), None)
    per_row = next((int(x[len("scale_vec::") : -1]) for x in p if x.startswith("scale_vec::")), None)
    if per_row and kind != "mxf8f6f4":
        vector = 64 // per_row
    elif kind == "mxf4nvf4" and vector is None:
        raise Unsupported(f"{i.op} without a scale vector size")
    rest = args[6:] if scaled else args[4:]
    disabled = []
    if rest and isinstance(rest[0], Vec):
        disabled = [c.src(x, "b32") for x in items(rest.pop(0))]
        if len(disabled) != (2 if "cta_group::2" in p else 1) * LANE_WORDS:
            raise Unsupported(f"{i.op} with an output-lane mask of {len(disabled)} words")
    predicate = rest.pop(0)
    if ws and (disabled or not isinstance(next(iter(rest), Imm(0)), Imm) or (rest and rest[0].bits)):
        raise Unsupported(f"{i.op} with a zero-column mask")
    scale_input = rest[0].bits if rest and isinstance(rest[0], Imm) else 0
    if scale_input and (scale_input > 15 or kind not in ("f16", "tf32")):  # PTX ISA, "tcgen05.mma", scale-input-d
        raise Unsupported(f"{i.op} with scale-input-d {scale_input}")
    return c.python(
        Mma(
            i.pc,
            kind,
            "cta_group::2" in p,
            address_operand(c, args[0]),
            address_operand(c, args[1]) if a_in_tmem else c.src(args[1], "b64"),
            a_in_tmem,
            c.src(args[2], "b64"),
            c.src(args[3], "b32"),
            bool(predicate.bits) if isinstance(predicate, Imm) else c.pred(predicate),
            disabled,
            scale_input,
            address_operand(c, args[4]) if scaled else None,
            address_operand(c, args[5]) if scaled else None,
            vector,
            ws,
            target,
        )
    )
