"""Write the support matrix: all of it to docs/support.md, and short tables of it into README.md and a guide."""

from __future__ import annotations

import pathlib
import re
import textwrap
from typing import NamedTuple

from hopwell.kernels import support
from hopwell.kernels.capability.features import ENTRIES, gpus_of, support_matrix
from hopwell.kernels.capability.gpu_runs import MISSING

ROOT = pathlib.Path(__file__).parents[1]
FULL = ROOT / "docs" / "support.md"
PAGES_WITH_TABLES = (ROOT / "README.md", ROOT / "docs" / "guides" / "quantized_caches.md")
PLACE = re.compile(r"(<!-- (\w+) matrix.*?-->\n)(.*?)(<!-- end)", re.DOTALL)
COLUMNS = (support.HOPPER, support.BLACKWELL, support.SM120)
MARKS = """\
* ● The kernel has run on a GPU of this column.
* ◐ The kernel has not run on a GPU of this column. Its source, compiled for Hopper, has run on a Hopper GPU.
* ○ The kernel has run on the emulator only. The emulator executes the same PTX on the CPU, and looks for races.

The name after the mark is the matrix instruction of Q Kᵀ and P V. `(Q cast to 16 bits)`: the call first copies the fp8
query to 16 bits.
"""


class Row(NamedTuple):
    """A row of the table of GPUs: features of an entry that a kernel must have together, and footnotes by column."""

    title: str
    entry: str
    features: tuple[str, ...]
    notes: tuple[str, str, str] = ("", "", "")  # names of footnotes, or none

    def cells(self, numbers: dict[str, str]) -> list[str]:
        """Return the marks of each column, and the ``numbers`` of its footnotes."""
        rows = [ENTRIES[self.entry].feature(key) for key in self.features]
        marks = ([mark for arch in archs for row in rows for mark in row.marks(arch)] for archs in COLUMNS)
        return [
            f"{'; '.join(dict.fromkeys(found)) or MISSING} {numbers.get(note, '')}".strip()
            for found, note in zip(marks, self.notes, strict=True)
        ]


CONTEXT, XQA, MLA = support.CONTEXT, support.XQA, support.MLA
MLA_NOTES = ("", "pairs of rows", "rows of few heads")
# Footnotes by the names that rows cite. A footnote cites another one as {name}.
NOTES = {
    "model": "A model, not a measurement, predicts 80 % of a B200's 2250 TFLOP/s at 1 x 16384 tokens "
    "([blackwell.md](docs/kernels/blackwell.md)).",
    "head dims": "Head dims up to 128, and 160, 192, 224 and 256, which have pairs of CTAs. Others use `mma.sync`: "
    "pairs have multiples of 32, and tensor memory has no room for head dim 512.",
    "narrow caches": "Head dims up to 128, and 192/128. Others use `mma.sync`, because pairs of CTAs have no warps "
    "that dequantize. Four warps dequantize K and V in shared memory.",
    "fp8 head dims": "Head dims of {head dims}, and 192/128; the model predicts 2550 TFLOP/s at 1 x 16384 tokens and "
    "head dim 128. Others use `mma.sync` for the same reasons. It runs fp8 at 0.65 of the bf16 rate on an H200.",
    "block scales": "Hopper does not have the block-scaled instruction. It ran the same kernel with the plain one.",
    "decode rows": "Head dims up to 256, in tiles of up to 64 rows; at head dims 144 to 256 up to 16, or 8 over narrow "
    "caches. Head dim 512 uses `mma.sync`: 16-bit K and V have no room for two stages.",
    "narrow decode": "Rows are query heads of a KV head times new tokens. fp8, int8 and NVFP4 caches use `mma.sync` up "
    "to 16 rows, and `wgmma` for more. Over fp8 and int8 caches, head dims 144 to 256 use `mma.sync` up to 32 rows, "
    "and larger ones up to 8. Over NVFP4 caches, head dims from 160 on use it for all rows.",
    "pairs of rows": "More than 16 rows have pairs of CTAs with 128 rows a tile. These kernels have run on the "
    "emulator only.",
    "rows of few heads": "Each tile has 16 rows, so 128 heads read the keys eight times, mostly from L2. Rates on an "
    "H200 with a bf16 cache, at 32 x 8192 tokens, with 16 and 128 heads: 103 and 136 TFLOP/s. Hopper's own kernel: "
    "111 and 587 ([blackwell.md](docs/kernels/blackwell.md), [measured.md](docs/measured.md)).",
}
ROWS = (
    Row("Prefill, bf16 or fp16, head dim 64, 128, 192/128", CONTEXT, ("16bit", "head_dim"), ("", "model", "")),
    Row(
        "Prefill, bf16 or fp16, other head dims up to 512",
        CONTEXT,
        ("multiple_head_dim", "large_head_dim"),
        ("", "head dims", ""),
    ),
    Row("Prefill, fp8 KV cache, bf16 or fp16 query", CONTEXT, ("fp8_kv",), ("", "narrow caches", "")),
    Row("Prefill, fp8 KV cache, fp8 query", CONTEXT, ("fp8",), ("", "fp8 head dims", "block scales")),
    Row("Prefill, NVFP4 KV cache", CONTEXT, ("nvfp4_kv",), ("", "narrow caches", "")),
    Row("Decode, bf16 or fp16 KV cache", XQA, ("16bit",), ("", "decode rows", "")),
    Row(
        "Decode, fp8, int8 or NVFP4 KV cache",
        XQA,
        ("fp8_kv", "int8_kv", "nvfp4_kv"),
        ("narrow decode", "decode rows", ""),
    ),
    Row("Decode, fp8 KV cache, fp8 query", XQA, ("fp8",), ("narrow decode", "decode rows", "")),
    Row("MLA, bf16 or fp16 cache", MLA, ("16bit",), MLA_NOTES),
    Row("MLA, fp8 cache, bf16 or fp16 query", MLA, ("fp8_kv",), MLA_NOTES),
    Row("MLA, fp8 cache, fp8 query", MLA, ("fp8",), MLA_NOTES),
    Row("MLA, 656-byte rows (`fp8_ds_mla`)", MLA, ("fp8_ds_mla",), MLA_NOTES),
    Row("MLA, sparse top-k", MLA, ("sparse",), MLA_NOTES),
    Row("Append to a bf16, fp16, fp8 or NVFP4 cache", support.APPEND, ("16bit", "fp8_kv", "nvfp4_kv")),
)
SHORT_NAMES = {
    support.CONTEXT: "context prefill",
    support.FMHA_V2: "FMHAv2 prefill",
    support.CUDNN: "cuDNN prefill",
    support.XQA: "decode (both entries)",
    support.MLA: "MLA decode",
    support.APPEND: "append",
}
KINDS = ("head dims", "page sizes", "masks", "extras")


def full_page() -> str:
    """Return the content of docs/support.md."""
    return (
        "# Support by entry and GPU\n\n"
        f"{MARKS}\nA call marked {MISSING} raises `NotImplementedError`.\n\n"
        "* H100 and H200 are compute capability 9.0, B200 is 10.0, B300 is 10.3, RTX and DGX Spark are 12.x.\n"
        "* `tcgen05` products are several times as fast as `mma.sync` products on a B200 or B300. Decode needs few\n"
        "  products, and memory limits it instead: [kernels/blackwell.md](kernels/blackwell.md).\n"
        "* A decode row shows the kernel for 4 rows (query heads of a KV head times new tokens).\n"
        "* The [reasons](kernels/blackwell.md#warp-mma-kernels-on-blackwell) for `mma.sync` on a B200 or B300 are on\n"
        "  the page of these GPUs.\n"
        "* `python -m hopwell support` prints this page's tables.\n\n" + support_matrix()
    )


def note_numbers() -> dict[str, str]:
    """Return the footnotes' numbers, in the order in which the table cites them."""
    cited = dict.fromkeys(note for row in ROWS for note in row.notes if note)
    return {note: f"({number})" for number, note in enumerate(cited, 1)}


def footnotes(numbers: dict[str, str]) -> str:
    """Return the text of the footnotes, as a list."""
    texts = (f"{number.strip('()')}. {NOTES[note].format(**numbers)}" for note, number in numbers.items())
    wrapped = (textwrap.fill(text, 120, subsequent_indent="   ", break_on_hyphens=False) for text in texts)
    return "\n".join(wrapped) + "\n"


def gpu_matrix() -> str:
    """Return the table of README.md whose columns are GPUs, with its legend and footnotes."""
    lines = ["| | " + " | ".join(gpus_of(archs) for archs in COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    numbers = note_numbers()
    lines += [f"| {row.title} | {' | '.join(row.cells(numbers))} |" for row in ROWS]
    return "\n".join([MARKS, *lines, "", footnotes(numbers)])


def entry_matrix() -> str:
    """Return the table of README.md whose rows are entries: sizes, masks and extras, equal on all architectures."""
    lines = ["| | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for entry, name in SHORT_NAMES.items():
        rows = [row for row in ENTRIES[entry].features if row.archs]
        cells = ("; ".join(row.short_title for row in rows if row.kind == kind) for kind in KINDS)
        lines.append(f"| {name} | " + " | ".join(cell or MISSING for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page_matrix() -> str:
    """Return the table of page sizes by entry."""
    lines = ["| entry | page size |", "|---|---|"]
    for entry, name in SHORT_NAMES.items():
        sizes = (row for row in ENTRIES[entry].features if row.archs and row.kind == "page sizes")
        lines.append(f"| {name} | " + "; ".join(row.short_title for row in sizes) + " |")
    return "\n".join(lines) + "\n"


TABLES = {"gpu": gpu_matrix, "entry": entry_matrix, "page": page_matrix}


def pages() -> dict[pathlib.Path, str]:
    """Return the text of each document that has parts of the matrix."""
    texts = {FULL: full_page()}
    for page in PAGES_WITH_TABLES:
        texts[page] = PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", page.read_text())
    return texts


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
