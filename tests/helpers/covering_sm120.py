"""What the emulated tests of sm_120 have to run: kinds of operands, masks and pages, each with each of the others, and
outputs and scores with each kind of operands.

Sinks, the log-sum-exp and statistics change no kernel, so that they are no choice: cells of prefill and decode are run
with sinks, and with those results that their references know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from helpers.covering import CONTIGUOUS, PAGES16, PAGES64, ROWS, TOPK
from hopwell.kernels.config.base import KernelConfig, KvFetch, KvType
from hopwell.kernels.config.prefill import MASKS, PrefillConfig
from hopwell.kernels.problem import Family, MaskKind, ScoreKind


class Cell(NamedTuple):
    """A kind of launch. ``types`` are those of queries and of K and V; boxes count as of 16 tokens or of 64. An output
    without a name is of the queries' type, or where these are e4m3, bf16."""

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
        """Tell whether there are such launches: lanes copy 8-bit keys of MLA, NVFP4 caches have pages, and the entry
        that takes them has no chunks. Of MLA in fp16, which takes long to compile, pages of 64 stand for others."""
        if self.family is Family.MLA:
            kept = {BF16: PAGES[Family.MLA], FP16: (PAGES64,)}
            return self.pages in kept.get(self.types, (ROWS, TOPK))
        return not (self.types[1] is KvType.NVFP4 and (self.pages == CONTIGUOUS or self.mask is MaskKind.CHUNKED))

    def pairs(self) -> Iterator[tuple]:
        """Return what is run together with what."""
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


# Outputs of other types than the usual ones, and scores, which entries have for queries and caches of one type.
OUTS = {
    (Family.PREFILL, ("e4m3", WIDE)): ("", "fp16", "e4m3", "nvfp4"),
    (Family.PREFILL, ("fp16", NVFP4)): ("bf16", "e4m3", "nvfp4"),  # what the entry has dequantized from e4m3
    (Family.DECODE, ("bf16", E4M3)): ("", "e4m3"),
    (Family.DECODE, ("bf16", NVFP4)): ("", "e4m3"),
}
SCORES = {(Family.PREFILL, types): tuple(ScoreKind) for types in (BF16, FP16, ("e4m3", WIDE))}


def every_cell() -> list[Cell]:
    """Return all kinds of launches with outputs and scores as usual. Masks of ranks that share keys have tests of their
    own."""
    cells = (
        Cell(family, *choice)
        for family, choices in CHOICES.items()
        for choice in itertools.product(*choices, PAGES[family])
    )
    return [cell for cell in cells if cell.exists]


def with_choices(cell: Cell) -> Iterator[Cell]:
    """Yield the cell with each output and each score that goes with its operands."""
    kind = (cell.family, cell.types)
    for out, score in itertools.product(OUTS.get(kind, ("",)), SCORES.get(kind, (ScoreKind.SCALED,))):
        yield cell._replace(out=out, score=score)


def missing(covered: Iterable[Cell]) -> set[tuple]:
    """Pairs of choices that no cell has run together. A type decides what multiplies, a mask which loops there are, and
    pages what producers do: what all three would decide together is nothing. Outputs and scores meet each type of
    operands, whose results and registers they take."""
    every = [one for cell in every_cell() for one in with_choices(cell)]
    wanted, run = ({pair for cell in cells for pair in cell.pairs()} for cells in (every, covered))
    return wanted - run


def filling(covered: Iterable[Cell]) -> list[Cell]:
    """Few cells that run what these do not: the one with most of it first."""
    found: list[Cell] = []
    left, every = missing(covered), [one for cell in every_cell() for one in with_choices(cell)]
    while left:
        found.append(max(every, key=lambda cell: len(left & set(cell.pairs()))))
        left -= set(found[-1].pairs())
    return found
