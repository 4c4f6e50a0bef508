"""PTX text to instruction lists."""

from .model import SINK, Imm, Instr, Kernel, Mem, Not, Pair, Param, Reg, Special, Sym, Vec, type_size
from .parser import PtxError, parse_module

__all__ = [
    "SINK",
    "Imm",
    "Instr",
    "Kernel",
    "Mem",
    "Not",
    "Pair",
    "Param",
    "PtxError",
    "Reg",
    "Special",
    "Sym",
    "Vec",
    "parse_module",
    "type_size",
]
