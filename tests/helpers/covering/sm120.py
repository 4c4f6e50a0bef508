"""Launches that the emulated tests of sm_120 must cover: all pairs of operand types, masks and pages.

Outputs and scores are covered with each operand type. Sinks, the log-sum-exp and statistics change no kernel, so they
are no choice. Prefill and decode cells run with sinks, and with the results that their references support.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from helpers.covering.configs import CONTIGUOUS, PAGES16, PAGES64, ROWS, TOPK
from hopwell.kernels.config.base import KernelConfig, KvFetch, KvType
from hopwell.kernels.config.prefill import MASKS, PrefillConfig
from hopwell.kernels.problem import Family, MaskKind, ScoreKind


class Cell(NamedTuple):
    """A kind of launch.

    ``types`` are the types of queries and of K and V. Boxes count as 16 or 64 tokens. An output without a name has the
    queries' type, or bf16 for e4m3 queries.
    """

    family: Family
    types: tuple[str, KvType]
    mask: MaskKind
    pages: tuple[KvFetch, int]
    out: str = ""
    score: ScoreKind = ScoreKind.SCALED

    @staticmethod
    def of(config: KernelConfig) -> Cell:
        pages = PAGES64 if config.box_rows > 16 else PAGES16 if config.box_rows else (config.kv_fetch, 0)
        usual = "bf16" if config.dtype == "e4m3" else config.dtype
        out = config.out_dtype if config.out_dtype != usual else ""
        score = config.score if isinstance(config, PrefillConfig) else ScoreKind.SCALED
        return Cell(config.family, (config.dtype, config.kv_type), config.mask, pages, out, score)

    @property
    def exists(self) -> bool:
        """Whether such launches exist.

        Lanes copy 8-bit keys of MLA, NVFP4 caches have pages, and their entry does not support chunks. MLA in fp16
        takes long to compile, so pages of 64 stand for the others.
        """
        if self.family is Family.MLA:
            kept = {BF16: PAGES[Family.MLA], FP16: (PAGES64,)}
            return self.pages in kept.get(self.types, (ROWS, TOPK))
        return not (self.types[1] is KvType.NVFP4 and (self.pages == CONTIGUOUS or self.mask is MaskKind.CHUNKED))

    def pairs(self) -> Iterator[tuple]:
        """Yield the pairs of choices that this cell covers."""
        yield from ((self.family, *pair) for pair in itertools.combinations(self[1:4], 2))
        yield (self.family, self.types, "to " + self.out)
        yield (self.family, self.types, self.score)

    def __str__(self) -> str:
        dtype, kv_type = self.types
        kinds = (self.family.value, dtype, kv_type.value, self.mask.value, self.pages[0].value)
        more = [f"to_{self.out}"] * bool(self.out) + [self.score.value] * (self.score is not ScoreKind.SCALED)
        return "-".join(kinds) + (str(self.pages[1]) if self.pages[1] else "") + "".join(f"-{one}" for one in more)


WIDE, E4M3, INT8, NVFP4, DS_MLA = KvType.WIDE, KvType.E4M3, KvType.INT8, KvType.NVFP4, KvType.FP8_DS_MLA
DECODE_MASKS = (MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT)
BF16, FP16 = ("bf16", WIDE), ("fp16", WIDE)
CHOICES = {
    Family.PREFILL: ((BF16, FP16, ("e4m3", WIDE), ("bf16", E4M3), ("bf16", NVFP4), ("fp16", NVFP4)), MASKS),
    Family.DECODE: ((BF16, FP16, ("bf16", E4M3), ("bf16", INT8), ("bf16", NVFP4)), DECODE_MASKS),
    Family.MLA: ((BF16, FP16, ("bf16", E4M3), ("bf16", DS_MLA)), (MaskKind.CAUSAL,)),
}
PAGES = {Family.PREFILL: (CONTIGUOUS, ROWS, PAGES16, PAGES64), Family.DECODE: (ROWS, PAGES16, PAGES64)}
PAGES[Family.MLA] = (*PAGES[Family.DECODE], TOPK)


# Unusual output types, and scores. Entries support scores for queries and caches of one type.
OUTS = {
    (Family.PREFILL, ("e4m3", WIDE)): ("", "fp16", "e4m3", "nvfp4"),
    (Family.PREFILL, ("fp16", NVFP4)): ("bf16", "e4m3", "nvfp4"),  # the entry dequantizes this from e4m3
    (Family.DECODE, ("bf16", E4M3)): ("", "e4m3"),
    (Family.DECODE, ("bf16", NVFP4)): ("", "e4m3"),
}
SCORES = {(Family.PREFILL, types): tuple(ScoreKind) for types in (BF16, FP16, ("e4m3", WIDE))}


def every_cell() -> list[Cell]:
    """Return all kinds of launches with usual outputs and scores. Masks of DCP ranks have tests of their own."""
    cells = (
        Cell(family, *choice)
        for family, choices in CHOICES.items()
        for choice in itertools.product(*choices, PAGES[family])
    )
    return [cell for cell in cells if cell.exists]


def with_choices(cell: Cell) -> Iterator[Cell]:
    """Yield the cell with each output and each score that its operands allow."""
    kind = (cell.family, cell.types)
    for out, score in itertools.product(OUTS.get(kind, ("",)), SCORES.get(kind, (ScoreKind.SCALED,))):
        yield cell._replace(out=out, score=score)


def missing(covered: Iterable[Cell]) -> set[tuple]:
    """Return the pairs of choices that no cell covers.

    The type selects the products, the mask the loops, and pages the producers' code. No code depends on all three.
    Outputs and scores are paired with each type of operands, because they use its results and registers.
    """
    every = [one for cell in every_cell() for one in with_choices(cell)]
    wanted, run = ({pair for cell in cells for pair in cell.pairs()} for cells in (every, covered))
    return wanted - run


def filling(covered: Iterable[Cell]) -> list[Cell]:
    """Return a small set of cells for the missing pairs: the cell with most of them first."""
    found: list[Cell] = []
    left, every = missing(covered), [one for cell in every_cell() for one in with_choices(cell)]
    while left:
        found.append(max(every, key=lambda cell: len(left & set(cell.pairs()))))
        left -= set(found[-1].pairs())
    return found
