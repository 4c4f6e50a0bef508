"""PTX text -> :class:`Kernel` objects: flat instruction lists with registers and labels resolved.

The parser covers the kernels that NVIDIA's compilers print; it does not validate PTX. Grammar: PTX ISA, "Syntax".
"""

from __future__ import annotations

import re

from .model import REGISTER_KIND, SINK, Imm, Instr, Kernel, Mem, Not, Pair, Param, Reg, Special, Sym, Vec, type_size


class PtxError(Exception):
    """The text is not PTX that this parser accepts."""


_INTEGER = re.compile(r"^-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_F32 = re.compile(r"^0[fF][0-9a-fA-F]{8}$")
_F64 = re.compile(r"^0[dD][0-9a-fA-F]{16}$")
_BASE_OFFSET = re.compile(r"^(.*?)\s*\+\s*(-?\w+)$")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_REGISTERS = re.compile(r"^(.*)<(\d+)>$")
_VARIABLE = re.compile(r"^\.(local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")
_PARAM = re.compile(r"^\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr.*?)?\s+([\w$]+)(?:\[(\d+)\])?$")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
_MODULE_SHARED = re.compile(
    r"^\s*(?:\.extern|\.visible|\.weak)?\s*\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]", re.M
)


def split_arguments(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [x for x in (part.strip() for part in text.split(",")) if x]
    out, depth, start = [], 0, 0
    for k, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:k].strip())
            start = k + 1
    out.append(text[start:].strip())
    return [x for x in out if x]


class _Body:
    """Parses one kernel body."""

    def __init__(self, text: str, first_line: int):
        self.text, self.line = text, first_line
        self.scopes: list[dict[str, Reg]] = [{}]
        self.labels: list[dict[str, int]] = [{}]
        self.jumps: list[tuple[Instr, str, int]] = []
        self.counts = dict.fromkeys("phrdq", 0)
        self.instrs: list[Instr] = []
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        self.shared: dict[str, tuple[int, int]] = {}
        self.loc: tuple[int, int] | None = None

    # -- operands
    def lookup(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def operand(self, s: str):
        register = self.lookup(s)
        if register is not None:
            return register
        first = s[0]
        if s == "_":
            return SINK
        if first == "{":
            return Vec(tuple(self.operand(x) for x in split_arguments(s[1:-1])))
        if first == "[":
            return self.memory(s[1:-1])
        if first == "!":
            return Not(self.operand(s[1:].strip()))
        if "|" in s:
            a, b = s.split("|")
            return Pair(self.operand(a.strip()), self.operand(b.strip()))
        if _INTEGER.match(s):
            return Imm(int(s.rstrip("U"), 0))
        if _F32.match(s):
            return Imm(int(s[2:], 16), "f32")
        if _F64.match(s):
            return Imm(int(s[2:], 16), "f64")
        if first == "%":
            return Special(s[1:])
        m = re.match(r"^([\w$]+)\s*\+\s*(\d+)$", s)
        return Sym(m.group(1), int(m.group(2))) if m else Sym(s)

    def memory(self, inner: str) -> Mem:
        parts = split_arguments(inner)
        base, off = parts[0], 0
        m = _BASE_OFFSET.match(base)
        if m:
            base, off = m.group(1), int(m.group(2), 0)
        return Mem(self.operand(base), off, tuple(self.operand(x) for x in parts[1:]))

    # -- statements
    def run(self) -> None:
        text, i, n = self.text, 0, len(self.text)
        while i < n:
            c = text[i]
            if c == "\n":
                self.line += 1
            if c.isspace() or c == ";":
                i += 1
            elif c == "{":
                self.scopes.append({})
                self.labels.append({})
                i += 1
            elif c == "}":
                if len(self.scopes) == 1:
                    break
                self.scopes.pop()
                self.close_scope()
                i += 1
            elif text.startswith((".loc ", ".loc\t"), i):  # the one directive that ends with its line
                j = text.find("\n", i)
                self.location(text[i : j if j >= 0 else n])
                i = j if j >= 0 else n
            else:
                i = self.labelled_statement(i)
        self.close_scope(last=True)

    def labelled_statement(self, i: int) -> int:
        m = _LABEL.match(self.text, i)
        if m:
            self.labels[-1][m.group(1)] = len(self.instrs)
            return m.end()
        j = self.text.index(";", i)
        statement = self.text[i:j]
        self.statement(" ".join(statement.split()))
        self.line += statement.count("\n")
        return j + 1

    def location(self, text: str) -> None:
        m = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if m:
            self.loc = (int(m.group(1)), int(m.group(2)))

    def close_scope(self, last: bool = False) -> None:
        labels = self.labels[0] if last else self.labels.pop()
        rest = []
        for instr, name, depth in self.jumps:
            if name in labels and (last or depth > len(self.labels)):
                instr.target = labels[name]
            else:
                rest.append((instr, name, depth))
        self.jumps = rest
        if last and rest:
            raise PtxError(f"unresolved labels {[name for _, name, _ in rest]}")

    def statement(self, s: str) -> None:
        if s[0] == ".":
            self.directive(s)
            return
        guard, guard_not, text = None, False, s
        if s[0] == "@":
            g, s = s[1:].split(None, 1)
            guard_not = g[0] == "!"
            guard = self.lookup(g.lstrip("!"))
            if guard is None:
                raise PtxError(f"line {self.line}: unknown predicate in {text!r}")
        op, _, rest = s.partition(" ")
        instr = Instr(op, op.split("."), [], guard, guard_not, self.line, text, len(self.instrs), loc=self.loc)
        if instr.parts[0] == "bra":
            self.jumps.append((instr, rest.strip(), len(self.scopes)))
        elif instr.parts[0] == "call":
            instr.args = [rest]
        else:
            instr.args = [self.operand(x) for x in split_arguments(rest)]
        self.instrs.append(instr)

    def directive(self, s: str) -> None:
        word, _, rest = s.partition(" ")
        if word == ".reg":
            kind_name, _, names = rest.partition(" ")
            kind = REGISTER_KIND[kind_name[1:]]
            for name in names.split(","):
                m = _REGISTERS.match(name.strip())
                if m:
                    for k in range(int(m.group(2))):
                        self.declare(kind, f"{m.group(1)}{k}")
                else:
                    self.declare(kind, name.strip())
        elif word in (".local", ".shared"):
            m = _VARIABLE.match(s)
            if not m:
                raise PtxError(f"line {self.line}: {s}")
            align, size = int(m.group(2) or 4), type_size(m.group(3)) * int(m.group(5) or 1)
            if m.group(1) == "local":
                self.local_bytes = -(-self.local_bytes // align) * align
                self.local[m.group(4)] = self.local_bytes
                self.local_bytes += size
            else:
                self.shared[m.group(4)] = (align, size)

    def declare(self, kind: str, name: str) -> None:
        self.scopes[-1][name] = Reg(kind, self.counts[kind], name)
        self.counts[kind] += 1


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _params(text: str) -> list[Param]:
    out: list[Param] = []
    offset = 0
    for declaration in split_arguments(text):
        m = _PARAM.match(" ".join(declaration.split()))
        if not m:
            raise PtxError(f"parameter {declaration!r}")
        size = type_size(m.group(2)) * int(m.group(4) or 1)
        align = int(m.group(1) or size)
        offset = -(-offset // align) * align
        out.append(Param(m.group(3), size, align, offset))
        offset += size
    return out


def parse_module(text: str) -> dict[str, Kernel]:
    """Return all kernels of a PTX module by name."""
    files = {int(k): name for k, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    text = _strip_comments(text)
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxError("no .target directive: not a PTX module")
    dynamic, static = {}, {}
    for m in _MODULE_SHARED.finditer(text):
        if m.group(3):
            static[m.group(2)] = (int(m.group(1)), int(m.group(3)))
        else:
            dynamic[m.group(2)] = int(m.group(1))
    out = {}
    for m in _ENTRY.finditer(text):
        body = _Body(text[m.end() :], text.count("\n", 0, m.end()) + 1)
        body.run()
        shared, offset = {}, 0
        for name, (align, size) in {**static, **body.shared}.items():
            offset = -(-offset // align) * align
            shared[name] = (offset, size)
            offset += size
        threads = re.search(r"\.(?:reqntid|maxntid)\s+([\d,\s]+)", m.group(3))
        ctas_per_sm = re.search(r"\.minnctapersm\s+(\d+)", m.group(3))
        out[m.group(1)] = Kernel(
            m.group(1),
            _params(m.group(2)),
            body.instrs,
            body.counts,
            shared,
            offset,
            dynamic,
            body.local,
            body.local_bytes,
            tuple(int(x) for x in threads.group(1).split(",")) if threads else (),
            target.group(1),
            files,
            int(ctas_per_sm.group(1)) if ctas_per_sm else 1,
        )
    return out
