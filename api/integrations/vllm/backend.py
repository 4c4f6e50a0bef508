"""The backend HOPWELL of vLLM: its features, and the metadata of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.envs as envs
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from hopwell.decode import xqa_workspace_bytes
from hopwell.integrations.vllm import caches, capability
from hopwell.integrations.vllm.batch_metadata import HopwellMetadata
from hopwell.integrations.vllm.capability import FP8, NVFP4
from hopwell.kernels.masks import MaskKind

if TYPE_CHECKING:
    from hopwell.integrations.vllm.impl import HopwellImpl


class HopwellBackend(AttentionBackend):
    """Attention of hopwell for vLLM's decoder layers, selected by ``--attention-backend HOPWELL``.

    The answers to vLLM come from hopwell's support matrix for the device of the process.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(capability.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(capability.CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "HOPWELL"

    @staticmethod
    def get_impl_cls() -> type[HopwellImpl]:
        from hopwell.integrations.vllm.impl import HopwellImpl

        return HopwellImpl

    @staticmethod
    def get_builder_cls() -> type[HopwellMetadataBuilder]:
        return HopwellMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return caches.customized(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        mode = getattr(kv_cache_spec, "kv_quant_mode", None)
        return [MultipleOf(capability.NVFP4_TOKENS if mode is not None and mode.is_nvfp4 else 1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        arch, dtype = capability.arch_of(), capability.DTYPES[0]
        return arch is not None and capability.has_prefill(arch, head_size, dtype, dtype)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        arch, dtype = capability.arch_of(), capability.DTYPES[0]
        if kv_cache_dtype is not None and kv_cache_dtype not in capability.CACHE_DTYPES:
            return False
        return arch is not None and capability.has_append(arch, capability.cache_dtype(kv_cache_dtype, dtype))

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return capability.arch_of(device_capability) is not None

    @classmethod
    def supports_sink(cls) -> bool:
        return cls._has(sinks=True)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        arch = capability.arch_of()
        return arch is not None and capability.has_prefill(arch, 128, capability.DTYPES[0], FP8, head_scales=True)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return cls._has(mask=MaskKind.SLIDING_WINDOW)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return cls._has(mask=MaskKind.FULL)

    @classmethod
    def _has(cls, **features: Any) -> bool:
        arch, dtype = capability.arch_of(), capability.DTYPES[0]
        return arch is not None and capability.has_prefill(arch, 128, dtype, dtype, **features)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        arch = capability.arch_of(device_capability)
        if arch is None or dtype not in capability.DTYPES or kv_cache_dtype not in (None, *capability.CACHE_DTYPES):
            return None  # vLLM has asked for each of them before
        kv = capability.cache_dtype(kv_cache_dtype, dtype)
        query = capability.query_dtype(dtype, kv)
        if kv is NVFP4 and block_size is not None and block_size % capability.NVFP4_TOKENS:
            return f"block_size must be a multiple of {capability.NVFP4_TOKENS} with an NVFP4 cache, got {block_size}"
        if capability.has_prefill(arch, head_size, query, kv, sinks=has_sink):
            return capability.unaligned_rows(head_size, kv)
        return f"hopwell on {arch} has no kernel for head_size {head_size} with a {kv_cache_dtype} cache and {dtype}"

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **kwargs)
        window = kwargs.get("has_sliding_window", False)
        if window and kwargs.get("use_non_causal", False):
            reasons.append("non-causal attention with a sliding window not supported")
        if kwargs.get("use_dcp", False):
            sink = kwargs.get("has_sink", args[5] if len(args) > 5 else False)
            reasons += [
                f"DCP with {what} not supported"
                for what, given in (("a sliding window", window), ("attention sinks", sink))
                if given
            ]
        return reasons


class HopwellMetadataBuilder(AttentionMetadataBuilder[HopwellMetadata]):
    """Builds the metadata of batches without a copy to or from the host.

    hopwell reads all lengths on the device, and bounds never change a result. A CUDA graph replays any batch within the
    bounds of its capture.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name] for name in layer_names]
        self.decode_len = self._decode_len()
        self.workspace = self._workspace()
        # CUDA graphs read these, so they have places of their own.
        requests = vllm_config.scheduler_config.max_num_seqs + 1
        self.context_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.cum_seq_lens = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.has_biased_scores = any(getattr(layer.impl, "has_biased_scores", False) for layer in self.layers)
        # Other metadata consists of the runner's own tensors, except these two.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1 and not self.has_biased_scores

    def _decode_len(self) -> int:
        """Return the new tokens up to which a batch of decodes goes to the decode entry; 0 for none.

        The context entry and the decode entry round differently. Under batch invariance one of them serves all batches.
        """
        spec, dtype = self.kv_cache_spec, self.vllm_config.model_config.dtype
        kv = NVFP4 if spec.kv_quant_mode.is_nvfp4 else spec.dtype if spec.dtype in capability.DTYPES else FP8
        arch, longest = capability.arch_of(), max_decode_query_len(self.vllm_config)
        if envs.VLLM_BATCH_INVARIANT or arch is None:
            return 0
        able = all(capability.has_decode(arch, spec.head_size, dtype, kv, q_len=n) for n in {1, longest})
        return longest if able else 0

    def _workspace(self) -> torch.Tensor:
        """Return scratch for any batch of decodes. Layers run one after another, so all share it."""
        size, spec = 0, self.kv_cache_spec
        if self.decode_len:
            heads = max((layer.num_heads for layer in self.layers), default=spec.num_kv_heads)
            size = xqa_workspace_bytes(
                heads * self.dcp_world_size,
                spec.num_kv_heads,
                spec.head_size,
                self.vllm_config.model_config.max_model_len + spec.block_size,
                self.decode_len,
                self.device,
            )
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HopwellMetadata:
        common = common_attn_metadata
        if common_prefix_len:
            raise ValueError(f"common_prefix_len must be 0, got {common_prefix_len}")
        if common.rswa_prefix_lens is not None or common.mm_req_doc_ranges:
            raise NotImplementedError("HOPWELL does not support R-SWA and bidirectional multimodal ranges")
        local, context = self._lens_of_rank(common) if self.dcp_world_size > 1 else (None, None)
        cumulative = None
        if self.has_biased_scores:
            cumulative = self.cum_seq_lens[: common.seq_lens.shape[0] + 1]
            torch.cumsum(common.seq_lens, 0, dtype=torch.int32, out=cumulative[1:])
        longest = common.max_query_len
        # A single new token sees all keys with and without a causal mask.
        decodes = longest <= self.decode_len and (longest <= 1 or common.causal is True)
        if longest > 1 and self.dcp_world_size > 1 and self.interleave > 1:
            decodes = False  # the decode entry knows ranks that have every n-th key
        return HopwellMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=longest,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            decodes=decodes,
            max_decode_len=max(longest, 1),
            one_token_each=longest <= 1 and common.num_actual_tokens == common.seq_lens.shape[0],
            workspace=self.workspace,
            local_seq_lens=local,
            local_context_lens=context,
            cum_seq_lens=cumulative,
        )

    def _lens_of_rank(self, common: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of each request on this DCP rank, with and without the new tokens."""
        if common.causal is not True:
            raise NotImplementedError("HOPWELL does not support non-causal attention with DCP")
        if common.dcp_local_seq_lens is None:
            raise ValueError("dcp_local_seq_lens must be given with DCP, got None")
        lens = common.seq_lens - common.naive_query_lens()
        context = self.context_lens[: lens.shape[0]]
        context.copy_(get_dcp_local_seq_lens(lens, self.dcp_world_size, self.dcp_rank, self.interleave))
        return common.dcp_local_seq_lens, context

    def update_block_table(
        self, metadata: HopwellMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> HopwellMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: HopwellMetadata) -> None:
        """Do nothing: the metadata has the runner's own tensors."""
