"""Products that the GPU's compiler fuses with a sum.

PTX ISA, "add" and "mul": without a rounding modifier, a product and a sum may become one multiply-add with one
rounding. ptxas fuses a product if its only reader is a sum in the same basic block. With this rule, the FFMA counts of
all 157 prefill kernels for sm_90a without divisions match ptxas 13.0. Divisions add FFMA instructions of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..ptx import Instr, Mem, Not, Pair, Reg, Vec


def registers(operands: Iterable[object]) -> Iterator[Reg]:
    """Yield every register among the operands, once per mention."""
    for a in operands:
        if isinstance(a, Reg):
            yield a
        elif isinstance(a, Mem):
            yield from registers((a.base, *a.coords))
        elif isinstance(a, Vec):
            yield from registers(a.items)
        elif isinstance(a, Pair):
            yield from registers((a.a, a.b))
        elif isinstance(a, Not):
            yield a.reg


def _free_to_fuse(i: Instr, *names: str) -> bool:
    return i.guard is None and i.parts[0] in names and [p for p in i.parts[1:] if p != "ftz"] == ["f32"]


def _fused(product: Instr, total: Instr, place: int) -> Instr:
    """Return ``total`` fused with ``product``, which is its operand at ``place``."""
    name = "fma" if total.parts[0] == "add" else "fms" if place == 1 else "fnma"
    args = [total.args[0], *product.args[1:], total.args[3 - place]]
    return replace(total, parts=[name, *total.parts[1:]], args=args)


def contracted(instrs: list[Instr]) -> dict[int, Instr]:
    """Return the sums to fuse with a product, by number: ``fma`` (a b + c), ``fms`` (a b - c), ``fnma`` (c - a b).

    The products remain in the instruction list, but no other instruction reads them.
    """
    mentions = Counter(r for i in instrs for r in registers(i.args))
    leaders = {i.target for i in instrs if i.target >= 0}
    found: dict[int, Instr] = {}
    products: dict[Reg, Instr] = {}  # products of this block whose operands have not changed
    readers: defaultdict[Reg, list[Reg]] = defaultdict(list)  # products that read an operand
    for pc, i in enumerate(instrs):
        if pc in leaders or i.parts[0] == "bra":
            products.clear()
        if _free_to_fuse(i, "add", "sub"):
            for place in (1, 2):
                product = products.get(i.args[place])
                if product and product.parts[1:] == i.parts[1:]:
                    found[pc] = _fused(product, i, place)
                    break
        for written in registers(i.args[:1]):
            products.pop(written, None)
            for reader in readers.pop(written, ()):
                products.pop(reader, None)
        if _free_to_fuse(i, "mul") and mentions[i.args[0]] == 2:
            products[i.args[0]] = i
            for operand in registers(i.args[1:]):
                readers[operand].append(i.args[0])
    return found
