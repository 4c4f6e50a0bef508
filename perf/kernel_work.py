"""Work of a Blackwell prefill kernel in one step of its loop, read from its PTX and its machine code.

A step is both query tiles of 128 rows against one tile of keys.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hopwell.emulator.ptx import Imm, Instr, Kernel, Mem, Vec, parse_module
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.jit.toolchain import Artifact
from hopwell.kernels.parts.core.copy import VECTOR_BYTES
from hopwell.kernels.sm100.prefill.config import Q_TILES, Sm100PrefillConfig
from hopwell.perf.loops import Loop, around, innermost, natural_loops
from hopwell.perf.sass import Sass, disassemble, sass_loops
from hopwell.perf.steps import ALU, CONVERSION, FMA, MUFU, Mma

# Instruction names of the units of a lane in PTX and SASS.
_PTX_UNITS = {
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt"), MUFU),
    **dict.fromkeys(("fma", "add", "sub", "mul"), FMA),  # of float32; integers use the ALU
    **dict.fromkeys(("max", "min", "selp", "setp", "and", "or", "xor", "not", "shl", "shr", "mad"), ALU),
}
_SASS_UNITS = {
    "MUFU": MUFU,
    **dict.fromkeys(("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"), FMA),
    **dict.fromkeys(("FMNMX", "FMNMX3", "FSEL", "FSETP", "SEL", "ISETP", "IADD3", "VIADD", "VIMNMX"), ALU),
    **dict.fromkeys(("LEA", "LOP3", "SHF", "PLOP3", "IMAD", "PRMT"), ALU),
    "F2FP": CONVERSION,
}


@dataclass(frozen=True)
class Stretch:
    """Code that a warp executes in sequence: its demand on the units of a lane, and its machine code."""

    ptx: Mapping[str, float]  # results of a lane, by unit
    sass: Mapping[str, float]  # the same
    code: Sequence[Sass]


@dataclass(frozen=True)
class Work:
    """A kernel's steady-state loops. Softmax and correction cover one warp's work, for one query tile."""

    softmax: Stretch
    masked_softmax: Stretch
    correction: Stretch  # with the rescale of O
    calm_correction: Stretch  # without it
    store: Stretch  # of a query tile's output
    products: tuple[Mma, ...]  # of a query tile
    mma_issue: int  # instructions of the warp that issues products, a step
    tensor_load: int  # bytes of a lane's tensor memory read by softmax, for a query tile
    tensor_store: int
    rescale_bytes: int  # loaded by correction, and stored, when it rescales
    loaded_bytes: int  # of K and V, a step
    filled_bytes: int  # of shared memory that they fill, with columns of zeros
    exchanges: bool  # whether threads that share rows exchange their maxima in every step
    dequantization: Stretch | None = None  # of K and V, a step
    dequantized_bytes: int = 0  # of shared memory that it reads and writes, a step


def work(config: Sm100PrefillConfig, built: Artifact) -> Work:
    """Describe the work of the kernel of ``config``."""
    (kernel,) = parse_module(built.ptx.read_text()).values()
    code = disassemble(built.cubin)
    ptx, sass = PtxLoops(kernel), SassLoops(code)
    rescaling = skipped(ptx.correction.path, kernel.instrs, "tcgen05.ld")
    sass_rescaling = skipped(sass.correction.path, code, "LDTM")

    def stretch(path: Iterable[int], sass_path: Iterable[int]) -> Stretch:
        instructions = [code[i] for i in sass_path]
        return Stretch(ptx_results(kernel.instrs[i] for i in path), sass_results(instructions), instructions)

    def rest(loop: Loop, left_out: Collection[int]) -> list[int]:
        return [i for i in loop.path if i not in left_out]

    exchange = skipped(ptx.softmax.path, kernel.instrs, "bar.sync"), rare_exchange(sass.softmax.path, code)
    softmax = [kernel.instrs[i] for i in ptx.softmax.path]
    rescale = [kernel.instrs[i] for i in rescaling]
    dequantizes, sass_dequantizes = (one.dequantization.path if one.dequantization else [] for one in (ptx, sass))
    steps = around(sass.loops, sass.products)
    assert steps is not None
    return Work(
        softmax=stretch(rest(ptx.softmax, exchange[0]), rest(sass.softmax, exchange[1])),
        masked_softmax=stretch(ptx.masked_softmax.path, sass.masked_softmax.path),
        correction=stretch(ptx.correction.path, sass.correction.path),
        calm_correction=stretch(rest(ptx.correction, rescaling), rest(sass.correction, sass_rescaling)),
        store=stretch(ptx.store.path, sass.store.path),
        products=_bursts(product(kernel.instrs[i]) for i in ptx.products.path if _is_product(kernel.instrs[i])),
        mma_issue=Q_TILES * len(sass.products.path) + len(steps.without(sass.products)),
        tensor_load=_tensor_bytes(softmax, "ld"),
        tensor_store=_tensor_bytes(softmax, "st"),
        rescale_bytes=_tensor_bytes(rescale, "ld"),
        loaded_bytes=sum(config.layout.kv_dims) * HALFWORD_BYTES * config.tile.n,
        filled_bytes=sum(config.layout.columns) * HALFWORD_BYTES * config.tile.n,
        exchanges=not exchange[0],
        dequantization=stretch(dequantizes, sass_dequantizes) if dequantizes else None,
        dequantized_bytes=WARPGROUP * _vector_bytes(kernel.instrs[i] for i in dequantizes),
    )


class PtxLoops:
    """The loops of the roles in PTX."""

    def __init__(self, kernel: Kernel):
        code = self.code = kernel.instrs
        self.loops = natural_loops([_ptx_successors(one, len(code)) for one in code])
        softmax = self._having("ex2", "tcgen05.ld")
        # Masking compares and selects once for each column.
        softmax.sort(key=lambda loop: sum(code[i].parts[0] in ("setp", "selp") for i in loop.path))
        self.softmax, *_, self.masked_softmax = softmax
        (self.correction,) = (loop for loop in self._having("tcgen05.ld", "tcgen05.st") if not self._has(loop, "ex2"))
        (self.store,) = (loop for loop in self._having("tcgen05.ld", "st.global") if not self._has(loop, "tcgen05.st"))
        self.products = steady(self.loops, innermost(self.loops, self._has_both_products))
        # Loaders also read work tiles and write rows of zeros.
        vectors = self._having("ld.shared.v4", "st.shared.v4")
        vectors = [loop for loop in vectors if not (self._has(loop, "tcgen05") or self._has(loop, "cp.async"))]
        self.dequantization = vectors[-1] if vectors else None

    def _has(self, loop: Loop, prefix: str) -> bool:
        return any(self.code[i].op.startswith(prefix) for i in loop.path)

    def _having(self, *prefixes: str) -> list[Loop]:
        return innermost(self.loops, lambda loop: all(self._has(loop, prefix) for prefix in prefixes))

    def _has_both_products(self, loop: Loop) -> bool:
        kinds = {product(self.code[i]).a_in_tensor_memory for i in loop.path if _is_product(self.code[i])}
        return len(kinds) == 2


class SassLoops:
    """The loops of a kernel in machine code."""

    def __init__(self, code: Sequence[Sass]):
        self.code, self.loops = code, sass_loops(code)
        softmax = self._having("MUFU.EX2", "LDTM")
        softmax.sort(key=lambda loop: sum(code[i].root in ("FSEL", "ISETP") for i in loop.path))
        self.softmax, *_, self.masked_softmax = softmax
        (self.correction,) = (loop for loop in self._having("LDTM", "STTM") if not self._has(loop, "MUFU.EX2"))
        (self.store,) = (loop for loop in self._having("LDTM", "STG") if not self._has(loop, "STTM"))
        vectors = self._having("LDS.128", "STS.128")
        vectors = [loop for loop in vectors if not self._has(loop, "TM")]
        self.dequantization = vectors[-1] if vectors else None
        # UTCHMMA in 16 bits, UTCQMMA in 8
        self.products = steady(self.loops, self._having("MMA tmem", "MMA gdesc"))

    def _has(self, loop: Loop, text: str) -> bool:
        return any(text in self.code[i].text for i in loop.path)

    def _having(self, *texts: str) -> list[Loop]:
        return innermost(self.loops, lambda loop: all(self._has(loop, text) for text in texts))


def steady(loops: Sequence[Loop], products: Sequence[Loop]) -> Loop:
    """Return the loop over query tiles in the steady state: the loop around it, over steps, is shorter than the loop
    over work tiles."""

    def around_it(loop: Loop) -> int:
        outer = around(loops, loop)
        assert outer is not None
        return len(outer.path)

    return min(products, key=around_it)


def _ptx_successors(one: Instr, end: int) -> list[int]:
    follows = [one.pc + 1] if one.pc + 1 < end else []
    if one.parts[0] == "bra":
        return [one.target, *(follows if one.guard else [])]
    return follows if one.guard or one.parts[0] not in ("ret", "exit") else []


def skipped(path: Sequence[int], code: Sequence[Instr] | Sequence[Sass], op: str) -> set[int]:
    """Return the smallest block with ``op`` that a forward branch of ``path`` jumps over, empty without one."""
    pieces = [{j for j in path if i < j < code[i].target} for i in path if code[i].target > i]
    return min((piece for piece in pieces if any(code[j].op.startswith(op) for j in piece)), key=len, default=set())


def rare_exchange(path: Sequence[int], code: Sequence[Sass]) -> set[int]:
    """Return the exchange of maxima that a barrier with a vote decides about, if few steps have one: predicated
    instructions after that barrier."""
    votes = [n for n, i in enumerate(path) if code[i].op.startswith("BAR.RED")]
    rest = path[votes[0] + 1 :] if votes else ()
    return set(
        itertools.takewhile(lambda i: code[i].is_guarded, itertools.dropwhile(lambda i: not code[i].is_guarded, rest))
    )


def ptx_results(code: Iterable[Instr]) -> Counter[str]:
    """Count the results of a lane, by unit."""
    results: Counter[str] = Counter()
    for one in code:
        name, kind = one.parts[0], one.parts[-1]
        if name == "cvt" and one.parts[-2] in ("bf16x2", "f16x2", "e4m3x2"):
            results[CONVERSION] += 1
        elif name in _PTX_UNITS:
            unit = _PTX_UNITS[name]
            results[ALU if unit == FMA and not kind.startswith("f32") else unit] += 2 if kind == "f32x2" else 1
    return results


def sass_results(code: Iterable[Sass]) -> Counter[str]:
    """Count the results of a lane in machine code, by unit, as :func:`ptx_results` does for PTX."""
    results: Counter[str] = Counter()
    for one in code:
        if one.root in _SASS_UNITS:
            results[_SASS_UNITS[one.root]] += 2 if one.root in ("FFMA2", "FADD2", "FMUL2") else 1
    return results


def _is_product(one: Instr) -> bool:
    return one.op.startswith("tcgen05.mma")


def product(one: Instr) -> Mma:
    """Read a tcgen05.mma from its instruction descriptor (PTX ISA, "Instruction descriptor": N / 8 and M / 16)."""
    a, descriptor = one.args[1], one.args[3]
    if not isinstance(descriptor, Imm):
        raise ValueError(f"no constant instruction descriptor: {one.text}")
    bits = descriptor.bits
    return Mma(1, (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, isinstance(a, Mem), "cta_group::2" in one.op)


def _bursts(products: Iterable[Mma]) -> tuple[Mma, ...]:
    """Return a burst for each kind of MMA."""
    return tuple(replace(one, count=count) for one, count in Counter(products).items())


def _vector_bytes(code: Iterable[Instr]) -> int:
    """Count the bytes of shared memory that a lane reads and writes as vectors."""
    return VECTOR_BYTES * sum(one.op.startswith(("ld.shared.v4", "st.shared.v4")) for one in code)


def _tensor_bytes(code: Iterable[Instr], direction: str) -> int:
    """Count the bytes of a lane that tcgen05.ld or tcgen05.st moves."""
    moves = [one for one in code if one.op.startswith(f"tcgen05.{direction}.")]
    return sum(4 * len(arg.items) for one in moves for arg in one.args if isinstance(arg, Vec))
