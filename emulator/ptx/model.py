"""Parts of a parsed kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

# Register file of each declared type: predicates, 16, 32, 64 and 128 bits wide. 8-bit values are in 16-bit registers.
REGISTER_KIND = {
    "pred": "p",
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"), "h"),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), "r"),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), "d"),
    "b128": "q",
}


def type_size(name: str) -> int:
    """Return the size in bytes of a PTX type name."""
    if name in ("f16x2", "bf16x2", "tf32"):
        return 4
    if name == "f32x2":
        return 8
    if name.endswith("x2"):  # packed narrow formats fill a 16-bit register
        return 2
    return int("".join(c for c in name if c.isdigit())) // 8


@dataclass(frozen=True)
class Reg:
    kind: str  # p h r d q
    idx: int
    name: str = ""


@dataclass(frozen=True)
class Imm:
    """``bits`` of the constant. ``floating`` ("f32", "f64") is the type of a decimal constant in a conversion."""

    bits: int
    floating: str = ""


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Sym:
    name: str
    off: int = 0


@dataclass(frozen=True)
class Mem:
    base: Reg | Sym | Imm
    off: int = 0
    coords: tuple = ()


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """Two destinations, ``d|p``."""

    a: object
    b: object


@dataclass(frozen=True)
class Not:
    """Negated predicate operand."""

    reg: Reg


SINK = Sym("_")


@dataclass
class Instr:
    op: str
    parts: list[str]
    args: list
    guard: Reg | None = None
    guard_not: bool = False
    line: int = 0
    text: str = ""
    pc: int = -1
    target: int = -1
    loc: tuple[int, int] | None = None  # file number and line of the source, when compiled with line information


@dataclass
class Param:
    name: str
    size: int
    align: int
    offset: int = 0


@dataclass
class Kernel:
    name: str
    params: list[Param]
    instrs: list[Instr]
    counts: dict[str, int]  # registers per kind
    shared: dict[str, tuple[int, int]]  # static shared memory: symbol -> offset, size
    static_smem: int
    dynamic: dict[str, int]  # extern shared symbols -> alignment
    local: dict[str, int]  # symbol -> offset
    local_bytes: int
    threads: tuple[int, ...]  # .reqntid or .maxntid
    target: str
    files: dict[int, str] = field(default_factory=dict)
    ctas_per_sm: int = 1  # .minnctapersm

    def where(self, pc: int) -> str:
        """Return the PTX line, Python line and text of an instruction, for reports."""
        if not 0 <= pc < len(self.instrs):
            return f"instruction {pc}"
        i = self.instrs[pc]
        source = f", {self.files.get(i.loc[0], '?')}:{i.loc[1]}" if i.loc else ""
        text = i.text if len(i.text) < 120 else i.text[:117] + "..."
        return f"PTX line {i.line}{source}: {text}"
