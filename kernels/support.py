"""The kernels that each device runs, and the head dims and page sizes with kernels.

``features.py`` lists the features of each entry point on each architecture.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hopwell.kernels import hardware
from hopwell.kernels.jit import settings

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
APPEND_SLOTS = "append_paged_kv_cache_with_slot_mapping"
NVFP4_APPEND_SLOTS = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
# Entries without a table of their own.
SAME_AS = {TRTLLM_DECODE: XQA, **dict.fromkeys((NVFP4_APPEND, APPEND_SLOTS, NVFP4_APPEND_SLOTS), APPEND)}

# Prefill kernels have these head dims (QK, V). Kernels of every matrix instruction have COMMON_HEAD_DIMS. Kernels that
# keep scores and the output in registers also have REGISTER_HEAD_DIMS. Blackwell has tensor-memory kernels for the
# common head dims, the others up to 128, and 160, 192, 224 and 256. It uses the sm_120 kernels for the rest.
COMMON_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
REGISTER_HEAD_DIMS = tuple((d, d) for d in (32, 40, 48, 80, 96, 104, 160, 192, 256, 512))
# Rare head dims are compiled on demand only.
RARE_HEAD_DIMS = tuple((d, d) for d in range(8, 257, 8) if (d, d) not in (*COMMON_HEAD_DIMS, *REGISTER_HEAD_DIMS))
OTHER_HEAD_DIMS = (*REGISTER_HEAD_DIMS, *RARE_HEAD_DIMS)
PREFILL_HEAD_DIMS = (*COMMON_HEAD_DIMS, *OTHER_HEAD_DIMS)
# (QK, V) of decode. 192/128 are the head dims of MiMo-V2.
DECODE_HEAD_DIMS = (*((d, d) for d in range(16, 257, 16)), (192, 128), (512, 512))
DECODE_NVFP4_HEAD_DIMS = tuple(dims for dims in DECODE_HEAD_DIMS if dims[0] in (64, 80, 96, 128, 160, 192, 256))
MLA_HEAD_DIMS = ((576, 512), (320, 256))  # (QK, V)
SPARSE_MLA_HEAD_DIMS = (*MLA_HEAD_DIMS, (512, 512))
FP8_DS_MLA_HEAD_DIMS = (576, 512)  # of caches with rows of 656 bytes
SHIPPED_FP8_HEAD_DIMS = tuple(  # of prefill kernels with 8-bit operands that are compiled ahead
    dims for dims in (*COMMON_HEAD_DIMS, *REGISTER_HEAD_DIMS) if dims[0] % 16 == 0 and dims[0] < 512
)
NVFP4_HEAD_DIMS = tuple(  # scales are read by fours
    dims for dims in SHIPPED_FP8_HEAD_DIMS if dims[0] % 64 == 0 == dims[1] % 64
)

HOPPER = hardware.with_instruction("wgmma")
BLACKWELL = hardware.with_instruction("tcgen05")
SM120 = hardware.with_instruction("mma.sync")

# Operand types of kernels that are compiled ahead. "16bit": inputs and output of one 16-bit dtype. "fp8_kv": 16-bit
# queries over e4m3 caches, with the queries' dtype as output. "fp8": e4m3 queries and caches with an output of 16 or 8
# bits.
TYPES_16BIT, TYPES_FP8_KV, TYPES_FP8 = "16bit", "fp8_kv", "fp8"
PREFILL_TYPES = (TYPES_16BIT, TYPES_FP8_KV, TYPES_FP8)

# A family-specific build (sm_120f) runs on every device of compute capability 12.x; a build for sm_120a runs only on
# 12.0.
FAMILY_BUILDS = {"sm_120a": "sm_120f"}
# Other architectures that can run an architecture's kernels, compiled for them. sm_120a kernels multiply with mma.sync
# and load with TMA, which the others have too. Block-scaled products of sm_120 become plain products there.
ALSO_RUN_ON = {"sm_120a": ("sm_90a", "sm_100a", "sm_103a")}


def arch_of(device: torch.device) -> str:
    """Return the architecture whose kernels a call on ``device`` uses.

    It is the device's own architecture, unless HOPWELL_KERNELS names another one whose kernels the device can run.

    Raises:
        NotImplementedError: no kernel family exists for the device.
        ValueError: the device is the CPU and the emulator is switched off, or the device cannot run the kernels that
            HOPWELL_KERNELS names.
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
    """Return the architecture for which the kernels of a call on ``device`` are compiled."""
    own, kernels = native_arch(device), arch_of(device)
    return build_of(kernels) if kernels == own else own


def build_of(arch: str) -> str:
    """Return the architecture for which kernels of ``arch`` are compiled by default."""
    return FAMILY_BUILDS.get(arch, arch)


def native_arch(device: torch.device) -> str:
    """Return the architecture of ``device``; for the CPU, the emulated architecture.

    Raises:
        NotImplementedError: no kernel family exists for the device.
        ValueError: the device is the CPU and the emulator is switched off.
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
