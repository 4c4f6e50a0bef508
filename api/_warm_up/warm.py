"""``hopwell.warm_up``: compile the kernels that a model's calls need."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hopwell._calls.switches import forget_calls
from hopwell._checks import arguments as checks
from hopwell._warm_up import model as models
from hopwell._warm_up.calls import Serving, calls_of
from hopwell._warm_up.model import LatentLayer, Layer
from hopwell.kernels import support
from hopwell.kernels.jit import ahead
from hopwell.kernels.launch.plan import planning
from hopwell.kernels.problem import Family
from hopwell.kernels.registry import Buildable

logger = logging.getLogger("hopwell")

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
QUERY_DTYPES = {"bfloat16": BF16, "float16": FP16, "bf16": BF16, "fp16": FP16, "fp8_e4m3": FP8, "fp8": FP8}
KV_DTYPES = QUERY_DTYPES | {"int8": torch.int8, "nvfp4": torch.uint8, "fp8_ds_mla": torch.uint8}
OUT_DTYPES = QUERY_DTYPES | {"nvfp4": torch.uint8}
AUTO = "auto"  # the model's dtype


@dataclass(frozen=True)
class Kernels:
    """The kernels of a model, and a line for each kind of call that has none."""

    configs: tuple[Buildable, ...]
    refused: tuple[str, ...]


def warm_up(
    model: Any,
    *,
    page_size: int = 16,
    kv_dtype: str | torch.dtype = AUTO,
    query_dtype: str | torch.dtype = AUTO,
    out_dtype: str | torch.dtype = AUTO,
    skip_softmax: bool = False,
    max_drafts: int = 0,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: Any = None,
    arch: str | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] = logger.info,
) -> list[str]:
    """Compile the kernels that the attention calls of a model need, unless the cache has them.

    The calls are prefill (``trtllm_batch_context_with_kv_cache``), decode with 0 to ``max_drafts`` draft tokens
    (``trtllm_batch_decode_with_kv_cache``, with and without a draft mask), MLA and its prefill, and append. Layers with
    soft caps, chunks or ALiBi take ``trtllm_fmha_v2_prefill`` for prefill and decode. Every number of tokens of a
    request is covered, and every batch size and length, up to 2^32 keys of a batch.

    Args:
        model: a path of a Hugging Face ``config.json`` or of its folder, a dict with its content, or a configuration
            object of transformers.
        page_size: tokens of a page of the KV cache.
        kv_dtype: dtype of the cache: "auto" (the model's), "bfloat16", "float16", "fp8_e4m3", "int8", "nvfp4" or
            "fp8_ds_mla" (MLA rows of 656 bytes), or a torch.dtype.
        query_dtype: dtype of the queries: "auto" (the model's), "bfloat16", "float16" or "fp8_e4m3", or a torch.dtype.
        out_dtype: dtype of the outputs: "auto" (the queries' if it has 16 bits, else the model's), "bfloat16",
            "float16", "fp8_e4m3" or "nvfp4", or a torch.dtype. Only ``trtllm_batch_context_with_kv_cache`` has NVFP4
            outputs; the other calls then have the model's dtype.
        skip_softmax: whether prefill calls have a ``skip_softmax_threshold_scale_factor``.
        max_drafts: most draft tokens of a decode request (speculative decoding).
        tensor_parallel: ranks that share the heads of each layer.
        context_parallel: ranks that share the keys of each request in decode (DCP).
        device: device of the calls; None means the current CUDA device, or the CPU if there is none.
        arch: architecture to compile for, such as "sm_90a", in place of a device. It needs no GPU.
        jobs: processes that compile; None means one for each CPU. Several processes are spawned, so the calling script
            needs ``if __name__ == "__main__":``. 1 compiles in this process.
        say: function that gets lines of text: kinds of calls without a kernel, number of kernels, estimated time and
            size, progress and the time left. By default they go to the logger "hopwell".

    Returns:
        The names of the kernels.

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: an argument or a field of the configuration has a wrong value; the message names it.
        FileNotFoundError: there is no file at ``model``.
        NotImplementedError: no call of a layer has a kernel.
        RuntimeError: a kernel is missing and HOPWELL_JIT=forbid.
    """
    found = kernels_of(
        model,
        page_size=page_size,
        kv_dtype=kv_dtype,
        query_dtype=query_dtype,
        out_dtype=out_dtype,
        skip_softmax=skip_softmax,
        max_drafts=max_drafts,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        device=device,
        arch=arch,
    )
    for line in found.refused:
        say(line)
    ahead.compile_and_report(found.configs, jobs, say)
    return [config.name for config in found.configs]


def kernels_of(
    model: Any,
    *,
    page_size: int,
    kv_dtype: str | torch.dtype,
    query_dtype: str | torch.dtype,
    out_dtype: str | torch.dtype,
    skip_softmax: bool,
    max_drafts: int,
    tensor_parallel: int,
    context_parallel: int,
    device: Any,
    arch: str | None,
) -> Kernels:
    """Return the kernels of a model's calls. The arguments are as in :func:`warm_up`."""
    if arch is not None and device is not None:
        raise ValueError(f"device must be None with arch={arch!r}, got {device!r}")
    if arch is not None:
        checks.choice("arch", arch, support.ARCHS)
    found = models.read(model)
    dtype = _dtype("dtype of the model", found.dtype or "bfloat16", QUERY_DTYPES, BF16)
    if query_dtype == AUTO and dtype not in checks.SIXTEEN_BIT:
        raise ValueError(f"query_dtype must be given for a model of {found.dtype}, got 'auto'")
    query = _dtype("query_dtype", query_dtype, QUERY_DTYPES, dtype)
    wide = query if query in checks.SIXTEEN_BIT else dtype
    serving = Serving(
        query=query,
        dtype=wide,
        kv=_dtype("kv_dtype", kv_dtype, KV_DTYPES, query),
        out=_dtype("out_dtype", out_dtype, OUT_DTYPES, wide),
        skip_softmax=checks.flag("skip_softmax", skip_softmax),
        page_size=checks.host_int("page_size", page_size, 1),
        drafts=checks.host_int("max_drafts", max_drafts),
        ranks=checks.host_int("context_parallel", context_parallel, 1),
        device=torch.device("cpu" if arch is not None else device or ("cuda" if torch.cuda.is_available() else "cpu")),
    )
    if any(isinstance(layer, LatentLayer) for layer in found.layers):
        _check_latent(serving)
    ranks = checks.host_int("tensor_parallel", tensor_parallel, 1)
    layers = [_shard(layer, ranks) for layer in found.layers]
    refused = [f"hopwell has no kernels for layers of type {kind!r}" for kind in found.others]
    configs: dict[str, Buildable] = {}
    with _emulating(arch):
        for layer in layers:
            of_layer, lines = _kernels(layer, serving)
            configs |= of_layer
            refused += lines
    return Kernels(tuple(configs.values()), tuple(dict.fromkeys(refused)))


def _check_latent(serving: Serving) -> None:
    """Refuse settings that the functions of MLA do not have."""
    if serving.out != serving.dtype:
        raise ValueError(f"out_dtype must be 'auto' or {serving.dtype} for a model with MLA, got {serving.out}")
    if serving.skip_softmax:
        raise ValueError("skip_softmax must be False for a model with MLA, got True")


def _dtype(name: str, value: Any, names: dict[str, torch.dtype], auto: torch.dtype) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in names.values():
        return value
    if isinstance(value, torch.dtype):
        raise ValueError(f"{name} must be one of {', '.join(map(str, dict.fromkeys(names.values())))}, got {value}")
    return auto if value == AUTO else names[checks.choice(name, value, (AUTO, *names))]


def _shard(layer: Layer | LatentLayer, ranks: int) -> Layer | LatentLayer:
    """Return the part of a layer on one of ``ranks`` tensor-parallel ranks. Ranks may share a KV head."""
    if layer.heads % ranks:
        raise ValueError(f"tensor_parallel must divide the {layer.heads} query heads of a layer, got {ranks}")
    if isinstance(layer, LatentLayer):
        return replace(layer, heads=layer.heads // ranks)
    if layer.kv_heads % ranks and ranks % layer.kv_heads:
        raise ValueError(
            f"tensor_parallel must divide the {layer.kv_heads} KV heads of a layer or be a multiple of their number, "
            f"got {ranks}"
        )
    return replace(layer, heads=layer.heads // ranks, kv_heads=max(1, layer.kv_heads // ranks))


def _emulating(arch: str | None) -> contextlib.AbstractContextManager[Any]:
    """Give CPU tensors the kernels of ``arch``."""
    if arch is None:
        return contextlib.nullcontext()
    from hopwell import emulator

    return emulator.use(arch)


def _kernels(layer: Layer | LatentLayer, serving: Serving) -> tuple[dict[str, Buildable], list[str]]:
    """Return the kernels of a layer, by name, and a line for each kind of call without a kernel."""
    forget_calls()  # a call that repeats an earlier one would be launched
    refused: dict[str, str] = {}  # descriptions by reason
    with planning() as kernels, torch.no_grad():
        for description, call in calls_of(layer, serving):
            try:
                call()
            except (NotImplementedError, ValueError) as error:  # ValueError: dtypes or page sizes that an entry refuses
                refused.setdefault(str(error), description)
    lines = [f"{layer}: no kernel for {description}: {reason}" for reason, description in refused.items()]
    if all(config.family is Family.APPEND for config in kernels.values()):
        raise NotImplementedError("; ".join(lines))
    return kernels, lines
