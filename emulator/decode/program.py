"""A kernel as data for the native core: instruction array, operand lists, register-file layout."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import numpy as np

from ..errors import EmulatorError, Unsupported
from ..native.layout import KIND_BRANCH, KIND_EXIT, KIND_PYTHON, SPECIALS, Insn, SpecialRow
from ..ptx import Instr, Kernel
from . import arithmetic, convert, memory, mma, sync, wgmma  # noqa: F401  (they register decoders)
from .contraction import contracted
from .op import Context, Op, find_decoder
from .registers import RegisterFile

Handler = Callable[..., object]
ROW_SLOT = 64  # bytes of the register file per slot in the written/busy/touched tables


def _refuse(message: str) -> Handler:
    def handler(*_: object) -> None:
        raise Unsupported(message)

    return handler


def check_groups(kernel: Kernel) -> None:
    """Refuse a kernel that mixes .cta_group::1 and ::2, as ptxas does (PTX ISA, "tcgen05 CTA pair")."""
    groups = {part: i for i in kernel.instrs if i.parts[0] == "tcgen05" for part in i.parts if "cta_group::" in part}
    if len(groups) > 1:
        places = "\n  ".join(kernel.where(i.pc) for i in groups.values())
        raise EmulatorError(f"all tcgen05 instructions of a kernel have one .cta_group; this one has two:\n  {places}")


class Program:
    """Decoded kernel. Its instruction numbers equal ``kernel.instrs``, plus one exit at the end."""

    def __init__(self, kernel: Kernel):
        from .. import engines  # noqa: F401  (they register decoders too)

        check_groups(kernel)
        self.kernel = kernel
        self.file = RegisterFile(kernel)
        self.handlers: dict[int, Handler] = {}
        words: list[int] = []
        refs: list[int] = []
        n = len(kernel.instrs)
        self.insns = (Insn * (n + 1))()
        fused = contracted(kernel.instrs)
        for pc, instr in enumerate(kernel.instrs):
            self._place(pc, fused.get(pc, instr), words, refs)
        self.insns[n].kind = KIND_EXIT
        self.insns[n].guard = -1
        self.words = np.array([*words, 0], np.uint32)
        self.refs = np.array([*refs, 0], np.uint32)
        self.specials = self._special_rows()

    def _place(self, pc: int, instr: Instr, words: list[int], refs: list[int]) -> None:
        """Decode one instruction into the native array."""
        op = self.decode(instr)
        x = self.insns[pc]
        x.fn, x.kind, x.imm = op.address, op.kind, op.imm
        x.o[:] = op.o
        x.space, x.size, x.vec, x.aux = op.space, op.size, op.vec, op.aux
        x.list, x.n_list = len(words), len(op.words)
        words += op.words
        x.refs, x.n_use, x.n_def = len(refs), len(op.uses), len(op.defs)
        refs += op.uses + op.defs
        x.guard = instr.guard.idx if instr.guard else -1
        x.guard_not = instr.guard_not
        x.target = instr.target
        self.handlers.pop(pc, None)
        if op.handler is not None:
            self.handlers[pc] = op.handler  # type: ignore[assignment]

    def decode(self, instr: Instr) -> Op:
        if instr.parts[0] == "bra":
            return Op(KIND_BRANCH)
        if instr.parts[0] in ("ret", "exit"):
            return Op(KIND_EXIT)
        decoder = find_decoder(instr.parts)
        where = f"PTX line {instr.line}: {instr.text}"
        if decoder is None:
            return Op(KIND_PYTHON, handler=_refuse(f"no such instruction in the emulator: {where}"))
        try:
            op = decoder(Context(self.file), instr)
            op.address  # noqa: B018  (raises if the native core lacks the function)
            return op
        except Unsupported as e:  # raised at execution, so unreachable code does no harm
            return Op(KIND_PYTHON, handler=_refuse(f"not emulated: {e} ({where})"))

    def with_edits(self, edits: dict[int, Instr]) -> Program:
        """Return this program with some instructions replaced. The fault campaign plants its faults this way."""
        other = copy.copy(self)
        other.kernel = copy.copy(self.kernel)
        other.kernel.instrs = list(self.kernel.instrs)
        # A copy of the kernel's instructions would take ten times as long as a short launch.
        other.file = copy.deepcopy(self.file, {id(self.kernel): other.kernel})
        other.handlers = dict(self.handlers)
        other.insns = type(self.insns).from_buffer_copy(self.insns)
        words, refs = self.words.tolist(), self.refs.tolist()
        for pc, instr in edits.items():
            instr.pc, instr.line, instr.loc = pc, self.kernel.instrs[pc].line, self.kernel.instrs[pc].loc
            other.kernel.instrs[pc] = instr
            other._place(pc, instr, words, refs)
        other.words, other.refs = np.array([*words, 0], np.uint32), np.array([*refs, 0], np.uint32)
        other.specials = other._special_rows()
        return other

    # -- special rows and parameters
    @property
    def n_specials(self) -> int:
        return len(self.file.specials) + len(self.file.addresses)

    def _special_rows(self) -> ctypes.Array[SpecialRow]:
        kinds = {"r": SPECIALS["shared_address"], "d": SPECIALS["shared_address64"]}
        rows = [*self.file.specials, *((kinds[w], row) for w, row, _ in self.file.addresses)]
        return (SpecialRow * max(1, len(rows)))(*(SpecialRow(*row) for row in rows))

    @property
    def file_bytes(self) -> int:
        return -(-self.file.total // ROW_SLOT) * ROW_SLOT

    def true_predicates(self) -> list[int]:
        return [number for key, number in self.file.extra_predicates.items() if key == ("const", True)]

    def template(self, param_bytes: bytes) -> np.ndarray:
        out = np.zeros(self.file_bytes, np.uint8)
        filled = self.file.template(param_bytes)
        out[: filled.size] = filled
        return out

    def constant_slots(self) -> list[int]:
        """Slots that strict mode treats as written from the start: all slots after the registers."""
        first = sum(self.kernel.counts[w] * size for w, size in (("r", 128), ("d", 256), ("q", 512), ("h", 64)))
        return list(range(first // ROW_SLOT, self.file_bytes // ROW_SLOT))

    def pack_params(self, raw: list[bytes]) -> bytes:
        size = max((p.offset + p.size for p in self.kernel.params), default=0)
        out = bytearray(size + 16)
        for p, value in zip(self.kernel.params, raw, strict=True):
            out[p.offset : p.offset + p.size] = value
        return bytes(out)

    def pointer(self, name: str) -> int:
        obj = getattr(self, name)
        return obj.ctypes.data if isinstance(obj, np.ndarray) else ctypes.addressof(obj)
