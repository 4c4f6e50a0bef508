"""The decoded form of one instruction, and the helpers that the decoders share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import Unsupported
from ..native import function_address
from ..native.layout import KIND_LANE, KIND_NOP, KIND_PYTHON, KIND_SYSTEM, NONE
from ..ptx import SINK, Imm, Instr, Mem, Not, Pair, Reg, Special, Sym, Vec, type_size
from .registers import ELEMENT, ROW_KIND, RegisterFile, constant_bits, width_of


@dataclass
class Op:
    """Contents of a native ``insn``."""

    kind: int
    name: str = ""
    o: list[int] = field(default_factory=lambda: [NONE] * 6)
    imm: int = 0
    words: list[int] = field(default_factory=list)  # operand list
    uses: list[int] = field(default_factory=list)
    defs: list[int] = field(default_factory=list)
    space: int = 0
    size: int = 0
    vec: int = 0
    aux: int = 0
    handler: object = None  # the handler of an instruction that Python executes

    @property
    def address(self) -> int:
        if not self.name:
            return 0
        found = function_address(self.name)
        if not found:
            raise Unsupported(f"no native function {self.name}")
        return found


Decoder = Callable[["Context", Instr], Op]
DECODERS: dict[str, Decoder] = {}


def decodes(*names: str) -> Callable[[Decoder], Decoder]:
    """Register a decoder for opcodes; the longest registered dotted prefix of an opcode wins."""

    def register(fn: Decoder) -> Decoder:
        for name in names:
            DECODERS[name] = fn
        return fn

    return register


def find_decoder(parts: list[str]) -> Decoder | None:
    for n in range(len(parts), 0, -1):
        found = DECODERS.get(".".join(parts[:n]))
        if found:
            return found
    return None


class Context:
    """Operand access for decoders: maps PTX operands to rows and records the reads and writes of an instruction."""

    def __init__(self, file: RegisterFile):
        self.file = file
        self.uses: list[int] = []
        self.defs: list[int] = []

    def _note(self, into: list[int], kind: str, row: int) -> None:
        into.append(ROW_KIND[kind] << 28 | row)

    # -- values
    def src(self, a, type_name: str) -> int:
        """Return the row of a source operand."""
        if isinstance(a, Reg):
            row = self.file.register(a)
            self._note(self.uses, a.kind, row)
            return row
        width = width_of(type_name)
        if isinstance(a, Imm):
            return self.file.constant(width, constant_bits(a, type_name))
        if isinstance(a, Special):
            return self.file.special(a)
        if isinstance(a, Sym) and a is not SINK:
            return self.file.symbol(a, width)
        raise Unsupported(f"operand {a} as {type_name}")

    def dst(self, a, type_name: str) -> int:
        """Return the row of a destination operand; ``_`` maps to a row without readers."""
        if a is SINK:
            return self.file.scratch(width_of(type_name))
        if not isinstance(a, Reg):
            raise Unsupported(f"destination {a}")
        row = self.file.register(a)
        self._note(self.defs, a.kind, row)
        return row

    def dst_or_none(self, a) -> int:
        return NONE if a is None or a is SINK else self.dst(a, "b32")

    def pred(self, a) -> tuple[int, bool]:
        """Return the predicate number of a source operand and whether it is negated."""
        if isinstance(a, Not):
            return self.pred(a.reg)[0], True
        if isinstance(a, Reg) and a.kind == "p":
            return a.idx, False
        if isinstance(a, Imm):
            return self.file.predicate(("const", bool(a.bits))), False
        if isinstance(a, Special) and a.name == "is_explicit_cluster":
            return self.file.predicate(("const", True)), False
        raise Unsupported(f"predicate operand {a}")

    def pred_dst(self, a) -> int:
        if a is None or a is SINK:
            return NONE
        self._note(self.defs, "p", a.idx)
        return a.idx

    def element(self, a, type_name: str) -> int:
        """Return the bytes per lane of an operand's row."""
        return ELEMENT[a.kind] if isinstance(a, Reg) else ELEMENT[width_of(type_name)]

    def address(self, mem: Mem) -> tuple[int, int, bool]:
        """Return the row, the byte offset and whether the address row is 64 bits wide."""
        base = mem.base
        if isinstance(base, Reg):
            row = self.file.register(base)
            self._note(self.uses, base.kind, row)
            return row, mem.off, base.kind == "d"
        if isinstance(base, Sym):
            return self.file.symbol(base, "r"), mem.off, False
        if isinstance(base, Imm):
            return self.file.constant("d", base.bits & (2**64 - 1)), mem.off, True
        raise Unsupported(f"address {mem}")

    # -- finished operations
    def lane(self, name: str, d=NONE, *sources: int, d2=NONE, imm: int = 0) -> Op:
        """Return an instruction on registers with up to four sources."""
        a, b, c, e = (*sources, NONE, NONE, NONE, NONE)[:4]
        return self._finish(Op(KIND_LANE, "op_" + name, [d, a, b, c, e, d2], imm))

    def system(self, name: str, d=NONE, a=NONE, b=NONE, c=NONE, e=NONE, d2=NONE, imm: int = 0, **fields) -> Op:
        return self._finish(Op(KIND_SYSTEM, "sys_" + name, [d, a, b, c, e, d2], imm, **fields))

    def python(self, handler) -> Op:
        return self._finish(Op(KIND_PYTHON, handler=handler))

    def nop(self) -> Op:
        return self._finish(Op(KIND_NOP))

    def _finish(self, op: Op) -> Op:
        op.uses, op.defs = self.uses, self.defs
        return op


def items(a) -> tuple:
    return a.items if isinstance(a, Vec) else (a,)


__all__ = ["DECODERS", "Context", "Op", "Pair", "decodes", "find_decoder", "items", "type_size"]
