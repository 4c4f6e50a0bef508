"""The backend HOPWELL_MLA_SPARSE of vLLM: latent attention to the keys that an indexer chose (DeepSeek V3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

import hopwell
from hopwell.integrations.vllm.mla import HopwellMLABackend, LatentLayer, layer_scales


class HopwellMLASparseBackend(HopwellMLABackend):
    """Sparse latent attention of hopwell for vLLM, selected by ``--attention-backend HOPWELL_MLA_SPARSE``."""

    @staticmethod
    def get_name() -> str:
        return "HOPWELL_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[HopwellMLASparseImpl]:
        return HopwellMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[HopwellMLASparseMetadataBuilder]:
        return HopwellMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


@dataclass(kw_only=True)
class HopwellMLASparseMetadata(SparseMLACommonMetadata):
    """Metadata of a batch."""


class HopwellMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[HopwellMLASparseMetadata]):
    """Builds the metadata of batches."""

    metadata_cls = HopwellMLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
            raise NotImplementedError("HOPWELL_MLA_SPARSE does not support hisparse_config")
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class HopwellMLASparseImpl(LatentLayer, SparseMLACommonImpl[HopwellMLASparseMetadata]):
    """A layer. Each new token is a row of its own, with the indices that its indexer chose."""

    hopwell_backend = "HOPWELL_MLA_SPARSE"

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HopwellMLASparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute latent attention to the chosen keys.

        Args:
            q: [tokens, heads, kv_lora_rank + qk_rope_head_dim], or its two parts.
            kv_c_and_k_pe_cache: [blocks, block_size, kv_lora_rank + qk_rope_head_dim], or rows of 656 bytes.
            attn_metadata: of the batch.
            layer: vLLM's layer, which has the scales of a quantized cache.

        Returns:
            The output [tokens, heads, kv_lora_rank], and None.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens, chosen = query.shape[0], self.topk_indices_buffer
        if chosen is None:
            raise ValueError("topk_indices_buffer must be given, got None")
        width = chosen.shape[1]
        rows = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            chosen[:tokens],
            BLOCK_SIZE=attn_metadata.block_size,
            NUM_TOPK_TOKENS=width,
        )
        on_qk, on_output = layer_scales(self.scale, layer, query.dtype, self.kv_dtype)
        out: Any = hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query[:, None],
            kv_c_and_k_pe_cache,
            torch.empty(0, dtype=torch.uint8, device=query.device),  # hopwell uses its own memory
            self.qk_nope_head_dim,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            rows[:, None],
            None,
            width,
            sparse_mla_top_k=width,
            bmm1_scale=on_qk,
            bmm2_scale=on_output,
        )
        return out.squeeze(1), None
