"""Record of the rows of the support matrix whose GPU tests have passed, and the marks that follow from it.

All runs were on Hopper GPUs: of Hopper's kernels, and of sm_120a's kernels compiled for Hopper. A row that is not in
the record has the mark of the emulator. After a GPU run of its tests, a new row's key is added here.
"""

from __future__ import annotations

from hopwell.kernels.hardware import WARP_MMA
from hopwell.kernels.problem import Family
from hopwell.kernels.support import HOPPER

RAN, RAN_ON_HOPPER, EMULATED, MISSING = "●", "◐", "○", "-"
# Matrix instructions of sm_120a's kernels that a Hopper GPU has; append has no products.
INSTRUCTIONS_OF_HOPPER = ("", WARP_MMA, f"{WARP_MMA} e4m3")


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of rows by kernel family: kernels do not know which entry calls them.
_BOTH = {
    Family.PREFILL: _keys("""
        16bit fp8 fp8_kv nvfp4_kv fp8_out nvfp4_out head_dim multiple_head_dim large_head_dim 8bit_head_dim
        nvfp4_head_dim page_size nvfp4_page_size cache causal full window chunked sinks tensor_scales skip_softmax lse
        alibi soft_cap alibi_soft_cap softmax_stats fp8_scales
    """),
    Family.DECODE: _keys("""
        16bit fp8 fp8_kv int8_kv nvfp4_kv fp8_out head_dim large_head_dim nvfp4_head_dim page_size cache speculative dcp
        window sinks tensor_scales
    """),
    Family.MLA: _keys("""
        16bit fp8 fp8_kv fp8_ds_mla head_dim sparse_head_dim page_size cache multi_token dcp sparse sinks tensor_scales
    """),
    Family.APPEND: _keys("16bit fp8_kv nvfp4_kv page_size cache tensor_scales"),
}
_HOPPER_ALONE = {Family.PREFILL: _keys("local_window"), Family.DECODE: _keys("unequal_head_dim head_scales")}
HOPPER_KERNELS = {family: keys | _HOPPER_ALONE.get(family, frozenset()) for family, keys in _BOTH.items()}
SM120_KERNELS = _BOTH


def mark(family: Family, key: str, arch: str, instruction: str) -> str:
    """Return the mark of a row, given the matrix instruction of the kernel that serves it on ``arch``."""
    if arch in HOPPER:
        return RAN if key in HOPPER_KERNELS[family] else EMULATED
    ran = instruction in INSTRUCTIONS_OF_HOPPER and key in SM120_KERNELS[family]
    return RAN_ON_HOPPER if ran else EMULATED
