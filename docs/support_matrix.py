"""Write what ``python -m hopwell support`` prints to docs/support.md, and a compact form of it into README.md."""

from __future__ import annotations

import pathlib
import re

from hopwell.kernels.features import EMULATED, OF_SM120, ON_HOPPER, support_matrix

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
FULL = ROOT / "docs" / "support.md"
SHORT_NAMES = {
    "trtllm_batch_context_with_kv_cache": "context",
    "trtllm_fmha_v2_prefill": "FMHAv2",
    "cudnn_batch_prefill_with_kv_cache": "cuDNN",
    "xqa_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache_mla": "MLA",
    "append_paged_kv_cache": "append",
}
PLACE = re.compile(r"(<!-- support matrix.*?-->\n)(.*?)(<!-- end)", re.DOTALL)
STYLE = {"yes": "{}", EMULATED: "*{}*", EMULATED + ON_HOPPER: "*{}*", EMULATED + OF_SM120: "*{}*+"}  # in a cell


def full_page() -> str:
    """Return what docs/support.md holds."""
    return (
        "# What each entry can do on each architecture\n\n"
        '"yes" is what has run on GPUs of that architecture. "emulator-verified" has not: its kernels compile for it,\n'
        "and the emulator has executed the same PTX, checked it against float64 and looked for races. Where it says\n"
        "so, the same source has run on a Hopper GPU besides, compiled for it. Where sm_100a and sm_103a have\n"
        '"(sm_120\'s)", kernels of sm_120 do some or all of what the row names. They multiply with mma.sync, and not\n'
        "with tensor memory, whose products are several times as fast: [kernels/blackwell.md](kernels/blackwell.md).\n"
        "\n"
        "Where kernels of sm_120 serve, e4m3 queries over NVFP4 caches and those of MLA are widened by a copy before\n"
        "the kernel, and on every architecture those of decode. What has not run on any GPU are the products that\n"
        "scale blocks, by which sm_120a multiplies e4m3 in prefill: Hopper lacks them, and has multiplied e4m3\n"
        "plainly.\n\n" + support_matrix()
    )


def compact_matrix() -> str:
    """Return one table whose rows are the entries: a column has the features that the same architectures have."""
    features: dict[str, dict[str, list[str]]] = {}  # by the architectures, and by the entry
    sections = support_matrix().strip().split("\n\n`")
    for section in sections:
        entry = section.strip("`").partition("`")[0].rpartition(".")[2]  # of several the first
        header, _, *rows = [line for line in section.split("\n") if line.startswith("|")]
        archs = _fields(header)[1:]
        for title, *marks in map(_fields, rows):
            known = [STYLE[mark].format(arch[3:-1]) for arch, mark in zip(archs, marks, strict=True) if mark in STYLE]
            if known:
                features.setdefault(", ".join(known), {}).setdefault(SHORT_NAMES[entry], []).append(title)
    columns = sorted(features, key=len, reverse=True)
    lines = ["| sm_ | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for entry in SHORT_NAMES.values():
        cells = ("; ".join(features[column].get(entry, ["-"])) for column in columns)
        lines.append(f"| {entry} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.strip("|").split("|")]


if __name__ == "__main__":
    FULL.write_text(full_page())
    README.write_text(PLACE.sub(lambda found: f"{found[1]}\n{compact_matrix()}\n{found[3]}", README.read_text()))
