"""What each entry point can do on each architecture: one table, read by the argument checks and by the README.

An entry asks :func:`require` for every feature that a call needs once its arguments are known to be well formed, so
that anything without a kernel is refused by name before a launch. :func:`support_matrix` prints the same table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopwell.kernels import hardware, settings

if TYPE_CHECKING:
    import torch

ARCHS = tuple(hardware.ARCHITECTURES)

CONTEXT = "trtllm_batch_context_with_kv_cache"
FMHA_V2 = "trtllm_fmha_v2_prefill"
CUDNN = "cudnn_batch_prefill_with_kv_cache"
XQA = "xqa_batch_decode_with_kv_cache"
TRTLLM_DECODE = "trtllm_batch_decode_with_kv_cache"
MLA = "trtllm_batch_decode_with_kv_cache_mla"
APPEND = "append_paged_kv_cache"
NVFP4_APPEND = "nvfp4_quantize_append_paged_kv_cache"
SAME_AS = {TRTLLM_DECODE: XQA, NVFP4_APPEND: APPEND}  # entries without a table of their own

# (QK, V) of the prefill kernels
COMMON_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
HOPPER_HEAD_DIMS = tuple((d, d) for d in (32, 40, 48, 80, 96, 104, 160, 192, 256, 512))
# Compiled on demand only.
OTHER_HOPPER_HEAD_DIMS = tuple((d, d) for d in range(8, 257, 8) if (d, d) not in (*COMMON_HEAD_DIMS, *HOPPER_HEAD_DIMS))
OTHER_HEAD_DIMS = (*HOPPER_HEAD_DIMS, *OTHER_HOPPER_HEAD_DIMS)
DECODE_HEAD_DIMS = (*range(16, 257, 16), 512)
DECODE_8BIT_HEAD_DIMS = DECODE_HEAD_DIMS[:-1]  # of 512 columns, O and Q of a warp take too many registers
DECODE_NVFP4_HEAD_DIMS = (64, 128, 256)  # lanes have equal parts of rows that consist of whole blocks
MLA_HEAD_DIMS = ((576, 512), (320, 256))  # (QK, V)
SPARSE_MLA_HEAD_DIMS = (*MLA_HEAD_DIMS, (512, 512))
FP8_DS_MLA_HEAD_DIMS = (576, 512)  # of rows of 656 bytes
BYTE_HEAD_DIMS = tuple(  # of prefill with operands of 8 bits, whose rows are multiples of 16 bytes
    dims for dims in (*COMMON_HEAD_DIMS, *HOPPER_HEAD_DIMS) if dims[0] % 16 == 0 and dims[0] < 512
)
NVFP4_HEAD_DIMS = tuple(
    dims for dims in BYTE_HEAD_DIMS if dims[0] % 64 == 0 == dims[1] % 64
)  # scales are read by fours
MAX_PAGE_SIZE = 1024

HOPPER = hardware.with_instruction("wgmma")
BLACKWELL = hardware.with_instruction("tcgen05")
SM120 = hardware.with_instruction("mma.sync")
_PREFILL = (*HOPPER, *BLACKWELL, *SM120)
NARROW_ARCHS = (*HOPPER, *SM120)  # whose prefill takes operands of 8 and 4 bits
_DECODE = (*HOPPER, *SM120)
_NOWHERE: tuple[str, ...] = ()

# A family-specific build runs on every device of compute capability 12.x, one for sm_120a on 12.0 alone.
FAMILY_BUILDS = {"sm_120a": "sm_120f"}
# Architectures besides their own that can run kernels, compiled for them. Those of sm_120a multiply with mma.sync and
# load with TMA, which the others have as well; what needs the block-scaled instructions is refused when it compiles.
ALSO_RUN_ON = {"sm_120a": ("sm_90a", "sm_100a", "sm_103a")}

# Whose kernels have run on a GPU of that architecture. Those of others have run on the emulator only.
RUN_ON_HARDWARE = HOPPER


@dataclass(frozen=True)
class Feature:
    """One row of the table. Features of the same ``kind`` are what a refusal offers instead of each other."""

    key: str
    kind: str
    title: str
    archs: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """An entry point: where it lives and what it can do."""

    module: str
    features: tuple[Feature, ...]

    def feature(self, key: str) -> Feature:
        """The feature called ``key``."""
        return next(feature for feature in self.features if feature.key == key)


def _listed(dims: tuple[tuple[int, int], ...]) -> str:
    return "head dim " + ", ".join(str(qk) if qk == v else f"{qk}/{v}" for qk, v in dims)


_OTHER_HEAD_DIM = Feature("other_head_dim", "head dims", "other head dims", _NOWHERE)
_PREFILL_HEAD_DIMS = (
    Feature("head_dim", "head dims", f"{_listed(COMMON_HEAD_DIMS)} (QK/V where they differ)", _PREFILL),
    Feature("multiple_head_dim", "head dims", "head dim: other multiples of 8 up to 256", (*HOPPER, *SM120)),
    Feature("wide_head_dim", "head dims", "head dim 512", (*HOPPER, *SM120)),
    _OTHER_HEAD_DIM,
    Feature("8bit_head_dim", "head dims", f"with fp8 query or KV: {_listed(BYTE_HEAD_DIMS)}", NARROW_ARCHS),
    Feature("other_8bit_head_dim", "head dims", "other head dims with fp8 query or KV", _NOWHERE),
)


def prefill_head_dim(dims: tuple[int, int]) -> str:
    """The key of the feature that a prefill of these head dims (QK, V) needs."""
    wide = ((512, 512),)
    known = {"head_dim": COMMON_HEAD_DIMS, "wide_head_dim": wide, "multiple_head_dim": OTHER_HEAD_DIMS}
    return next((key for key, listed in known.items() if dims in listed), "other_head_dim")


def decode_head_dim(dim: int) -> str:
    """The key of the feature that a decode of this head dim needs."""
    known = {"head_dim": DECODE_HEAD_DIMS[:-1], "wide_head_dim": DECODE_HEAD_DIMS}
    return next((key for key, listed in known.items() if dim in listed), "other_head_dim")


_OTHER_PAGE_SIZE = Feature("other_page_size", "page sizes", "other page sizes", _NOWHERE)


def append_page_size(size: int) -> str:
    """The key of the feature that an append to pages of so many tokens needs."""
    return "page_size" if size <= MAX_PAGE_SIZE and size & (size - 1) == 0 else "other_page_size"


def _page_sizes(archs: tuple[str, ...]) -> tuple[Feature, ...]:
    return (
        Feature("page_size", "page sizes", f"page size: 1 to {MAX_PAGE_SIZE}", archs),
        _OTHER_PAGE_SIZE,
    )


_16BIT = Feature("16bit", "data types", "bf16 or fp16 query, KV and output", _PREFILL)
_CAUSAL = Feature("causal", "masks", "causal mask (bottom-right)", _PREFILL)
_SKIP_SOFTMAX = Feature("skip_softmax", "extras", "skip-softmax", _PREFILL)


def _window(archs: tuple[str, ...]) -> Feature:
    return Feature("window", "masks", "sliding window", archs)


def _sinks(archs: tuple[str, ...]) -> Feature:
    return Feature("sinks", "extras", "attention sinks", archs)


def _tensor_scales(archs: tuple[str, ...]) -> Feature:
    return Feature("tensor_scales", "extras", "scales as device tensors", archs)


ENTRIES: dict[str, Entry] = {
    CONTEXT: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            Feature("fp8_kv", "data types", "fp8 (e4m3) KV cache with a bf16 or fp16 query", NARROW_ARCHS),
            Feature("fp8", "data types", "fp8 (e4m3) query and KV", NARROW_ARCHS),
            Feature("nvfp4_kv", "data types", "NVFP4 KV cache", NARROW_ARCHS),
            Feature("fp8_out", "data types", "fp8 (e4m3) output of an fp8 query", NARROW_ARCHS),
            Feature("nvfp4_out", "data types", "NVFP4 output of an fp8 query", NARROW_ARCHS),
            *_PREFILL_HEAD_DIMS,
            *_page_sizes(_PREFILL),
            Feature("cache", "KV caches", "HND and NHD, stacked and separate, shared and separate page ids", _PREFILL),
            _CAUSAL,
            Feature("full", "masks", "no mask (`causal=False`)", _PREFILL),
            _window(_PREFILL),
            _sinks(_PREFILL),
            _tensor_scales(_PREFILL),
            _SKIP_SOFTMAX,
            Feature("lse", "extras", "log-sum-exp, base 2 or e", _PREFILL),
            Feature("fp16_softmax", "extras", "softmax in fp16 (`use_fp16_softmax`)", _NOWHERE),
            Feature("spcompress", "extras", "`uses_spcompress`", _NOWHERE),
        ),
    ),
    FMHA_V2: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            Feature("fp8", "data types", "fp8 (e4m3) query and KV", NARROW_ARCHS),
            Feature("fp8_out", "data types", "fp8 (e4m3) output of an fp8 query", NARROW_ARCHS),
            *_PREFILL_HEAD_DIMS,
            *_page_sizes(_PREFILL),
            Feature("cache", "KV caches", "all five input layouts", _PREFILL),
            _CAUSAL,
            Feature("full", "masks", "no mask (`padding`)", _PREFILL),
            _window(_PREFILL),
            Feature("chunked", "masks", "chunked mask", _PREFILL),
            _sinks(_PREFILL),
            Feature("alibi", "extras", "ALiBi", _PREFILL),
            # On sm_100a a kernel of 128 columns spills 8 bytes.
            Feature("alibi_soft_cap", "extras", "ALiBi together with a soft cap", (*HOPPER, *SM120)),
            Feature("soft_cap", "extras", "logits soft cap", _PREFILL),
            Feature("softmax_stats", "extras", "softmax statistics", _PREFILL),
            _SKIP_SOFTMAX,
        ),
    ),
    CUDNN: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            Feature("fp8", "data types", "fp8 (e4m3) query and KV", NARROW_ARCHS),
            *_PREFILL_HEAD_DIMS,
            *_page_sizes(_PREFILL),
            Feature("cache", "KV caches", "paged and ragged KV, element offsets", _PREFILL),
            _CAUSAL,
            Feature("full", "masks", "no mask", _PREFILL),
            Feature("lse", "extras", "log-sum-exp, padded or ragged, base 2 or e", _PREFILL),
            Feature("fp8_scales", "extras", "scales of fp8 inputs (`q_scale`, `k_scale`, `v_scale`)", NARROW_ARCHS),
        ),
    ),
    XQA: Entry(
        "hopwell.decode",
        (
            Feature("16bit", "data types", "bf16 or fp16 query, KV and output", _DECODE),
            Feature("fp8_kv", "data types", "fp8 (e4m3) KV cache", _DECODE),
            Feature("int8_kv", "data types", "int8 KV cache", _DECODE),
            Feature("nvfp4_kv", "data types", "NVFP4 KV cache", _DECODE),
            Feature("fp8_out", "data types", "fp8 (e4m3) output with an fp8 or NVFP4 KV cache", _DECODE),
            Feature("head_dim", "head dims", "head dim: multiples of 16 up to 256", _DECODE),
            Feature("wide_head_dim", "head dims", "head dim 512", _DECODE),
            Feature("8bit_head_dim", "head dims", "with 8-bit caches: multiples of 16 up to 256", _DECODE),
            Feature("other_8bit_head_dim", "head dims", "other head dims with 8-bit caches", _NOWHERE),
            Feature(
                "nvfp4_head_dim",
                "head dims",
                f"with NVFP4 caches: {_listed(tuple((d, d) for d in DECODE_NVFP4_HEAD_DIMS))}",
                _DECODE,
            ),
            Feature("other_nvfp4_head_dim", "head dims", "other head dims with NVFP4 caches", _NOWHERE),
            _OTHER_HEAD_DIM,
            *_page_sizes(_DECODE),
            Feature("cache", "KV caches", "HND and NHD, stacked, separate, K and V the same data", _DECODE),
            Feature("speculative", "masks", "several tokens per request with a mask", _DECODE),
            Feature("dcp", "masks", "keys that ranks share (decode context parallel)", _DECODE),
            _window(_DECODE),
            _sinks(_DECODE),
            _tensor_scales(_DECODE),
        ),
    ),
    MLA: Entry(
        "hopwell.mla",
        (
            Feature("16bit", "data types", "bf16 or fp16 query and cache", _DECODE),
            Feature("fp8", "data types", "fp8 (e4m3) cache with a bf16, fp16 or fp8 query", _DECODE),
            Feature("fp8_ds_mla", "data types", "cache of 656-byte rows (fp8 with scales, bf16 rotary part)", _DECODE),
            Feature("head_dim", "head dims", f"{_listed(MLA_HEAD_DIMS)} (QK/V)", _DECODE),
            _OTHER_HEAD_DIM,
            Feature("sparse_head_dim", "head dims", "with sparse top-k head dim 512 as well", _DECODE),
            *_page_sizes(_DECODE),
            Feature("cache", "KV caches", "3-D and 4-D caches", _DECODE),
            Feature("multi_token", "masks", "several tokens per request (causal, bottom-right)", _DECODE),
            Feature("dcp", "masks", "keys that ranks share (decode context parallel)", _DECODE),
            Feature("sparse", "masks", "sparse top-k", _DECODE),
            _sinks(_DECODE),
            _tensor_scales(_DECODE),
        ),
    ),
    APPEND: Entry(
        "hopwell.page",
        (
            Feature("16bit", "data types", "bf16 or fp16 new tokens, and a cache of their type", ARCHS),
            Feature("fp8_kv", "data types", "fp8 (e4m3) cache", ARCHS),
            Feature("nvfp4_kv", "data types", "NVFP4 cache, V scales linear or interleaved", ARCHS),
            Feature("page_size", "page sizes", f"page size: powers of two up to {MAX_PAGE_SIZE}", ARCHS),
            _OTHER_PAGE_SIZE,
            Feature("cache", "KV caches", "HND and NHD, stacked and separate, shared and separate page ids", ARCHS),
            _tensor_scales(ARCHS),
        ),
    ),
}


def refusal(entry: str, feature: str, detail: str, arch: str) -> NotImplementedError:
    """The error for a call of ``entry`` that needs a ``feature`` without a kernel on ``arch``.

    Args:
        entry: name of the entry point.
        feature: key of the feature in the table.
        detail: the argument and value that ask for it, for example ``"out_dtype='nvfp4'"``.
        arch: architecture of the call.
    """
    table = ENTRIES[SAME_AS.get(entry, entry)]
    row = table.feature(feature)
    here = [other.title for other in table.features if other.kind == row.kind and arch in other.archs]
    return NotImplementedError(
        f"{entry}: {row.title} ({detail}) is not supported on {arch}; "
        f"{row.kind} supported on {arch}: {'; '.join(here) or 'none yet'}; "
        f"architectures that support {row.title}: {', '.join(row.archs) or 'none yet'}"
    )


def require(entry: str, feature: str, detail: str, arch: str) -> None:
    """Raise :func:`refusal`'s error unless ``entry`` has ``feature`` on ``arch``."""
    if arch not in ENTRIES[SAME_AS.get(entry, entry)].feature(feature).archs:
        raise refusal(entry, feature, detail, arch)


def _mark(row: Feature, arch: str) -> str:
    if arch not in row.archs:
        return "-"
    return "yes" if arch in RUN_ON_HARDWARE else "emulator-verified"


def support_matrix() -> str:
    """The table in Markdown: for each entry its features as rows and the architectures as columns.

    "yes" has run on hardware; "emulator-verified" has not: its kernels have run on the emulator.
    """
    sections = []
    for name, entry in ENTRIES.items():
        names = [name, *(other for other, table in SAME_AS.items() if table == name)]
        lines = [
            ", ".join(f"`{entry.module}.{one}`" for one in names),
            "",
            "| | " + " | ".join(ARCHS) + " |",
            "|---|" + ":---:|" * len(ARCHS),
        ]
        lines += [f"| {row.title} | " + " | ".join(_mark(row, arch) for arch in ARCHS) + " |" for row in entry.features]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def arch_of(device: torch.device) -> str:
    """The architecture whose kernels a call on ``device`` uses: the device's own, unless HOPWELL_KERNELS names another
    one whose kernels the device can run.

    Raises:
        NotImplementedError: no kernel family exists for the device.
        ValueError: the device is the CPU, and the emulator is switched off; or HOPWELL_KERNELS does not go with it.
    """
    own = native_arch(device)
    kernels = settings.choice("HOPWELL_KERNELS", ARCHS, "") or own
    if kernels != own and own not in ALSO_RUN_ON.get(kernels, ()):
        able = [arch for arch in ARCHS if arch == own or own in ALSO_RUN_ON.get(arch, ())]
        raise ValueError(
            f"HOPWELL_KERNELS={kernels}: kernels of {kernels} cannot run on device {device}, which is {own}; "
            f"kernels that can: {', '.join(able) or 'none'}"
        )
    return kernels


def target_of(device: torch.device) -> str:
    """The architecture for which the kernels of a call on ``device`` are compiled."""
    own, kernels = native_arch(device), arch_of(device)
    return build_of(kernels) if kernels == own else own


def build_of(arch: str) -> str:
    """The architecture for which kernels of ``arch`` are compiled where nothing else is asked for."""
    return FAMILY_BUILDS.get(arch, arch)


def native_arch(device: torch.device) -> str:
    """The architecture that ``device`` is; for the CPU the one that is emulated.

    Raises:
        NotImplementedError: no kernel family exists for the device.
        ValueError: the device is the CPU, and the emulator is switched off.
    """
    if device.type == "cuda":
        return _cuda_arch(device)
    if device.type != "cpu":
        raise NotImplementedError(
            f"device {device} is not supported; supported: CUDA devices of {', '.join(ARCHS)}, and the CPU (emulated)"
        )
    from hopwell.emulator.options import options

    arch = options().arch
    if arch is None:
        raise ValueError("the tensors are on the CPU, and HOPWELL_EMULATE=off switches off running kernels there")
    return "sm_120a" if arch == "sm_121a" else arch


@functools.lru_cache(maxsize=64)
def _cuda_arch(device: torch.device) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    arch = hardware.of_capability(major, minor)
    if arch is None:
        raise NotImplementedError(
            f"device {device} has compute capability {major}.{minor}, which is not supported; "
            f"supported: {', '.join(ARCHS)}"
        )
    return arch


@functools.lru_cache(maxsize=64)
def halves_products(device: torch.device) -> bool:
    """Whether a device of sm_120 multiplies operands of 8 bits at half of its rate unless blocks are scaled. GeForce
    cards do, those for workstations do not."""
    import torch

    return device.type == "cuda" and "GeForce" in torch.cuda.get_device_name(device)


def has_pdl(arch: str) -> bool:
    """Whether ``arch`` has programmatic dependent launch: compute capability 9.0 and later."""
    return int(arch[3:-1]) >= 90
