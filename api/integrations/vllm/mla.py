"""The backend HOPWELL_MLA of vLLM: decode of DeepSeek models over a latent cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf, max_decode_query_len

import hopwell
from hopwell.integrations.vllm import capability
from hopwell.integrations.vllm.capability import FP8, MLA_CACHE_DTYPES
from hopwell.mla import mla_workspace_bytes


def mla_query_dtype(dtype: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """Return the dtype of queries: e4m3 queries have a bfloat16 output, so float16 models keep theirs."""
    return FP8 if kv is FP8 and dtype is torch.bfloat16 else dtype


def take_dtypes(impl: Any, kv_cache_dtype: str) -> None:
    """Give an MLA implementation of vLLM the dtypes of its cache and queries, and follow vLLM's batch invariance."""
    dtype = torch.get_default_dtype()
    impl.kv_dtype = capability.cache_dtype(kv_cache_dtype, dtype, MLA_CACHE_DTYPES)
    impl.supports_quant_query_input = mla_query_dtype(dtype, impl.kv_dtype) is FP8
    if envs.VLLM_BATCH_INVARIANT:
        hopwell.batch_invariant(True)


def layer_scales(scale: float, layer: Any, query: torch.dtype, kv: torch.dtype) -> tuple[float, float]:
    """Return the factors on q k^T and on the output for a layer of vLLM."""
    if kv is not FP8:
        return scale, 1.0
    on_query = layer._q_scale_float if query is FP8 else 1.0
    return scale * on_query * layer._k_scale_float, layer._k_scale_float


def check_features(name: str, alibi_slopes: Any, sliding_window: Any, logits_soft_cap: Any, attn_type: str) -> None:
    """Refuse layers with features that latent attention of hopwell does not have."""
    features = dict(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
    for argument, value in features.items():
        if value:
            raise NotImplementedError(f"{name} does not support {argument}, got {value}")
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"{name} supports decoder layers, got attn_type={attn_type}")


class HopwellMLABackend(MLACommonBackend):
    """Multi-head latent attention of hopwell for vLLM, selected by ``--attention-backend HOPWELL_MLA``.

    The answers to vLLM come from hopwell's support matrix for the device of the process.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(capability.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(MLA_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "HOPWELL_MLA"

    @staticmethod
    def get_impl_cls() -> type[HopwellMLAImpl]:
        return HopwellMLAImpl

    @staticmethod
    def get_builder_cls() -> type[HopwellMLAMetadataBuilder]:
        return HopwellMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        arch, dtype = capability.arch_of(), capability.DTYPES[0]
        return arch is not None and capability.has_mla_decode(arch, head_size, dtype, dtype, sparse=cls.is_sparse())

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return capability.arch_of(device_capability) is not None

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
        if arch is None or dtype not in capability.DTYPES or kv_cache_dtype not in (None, *MLA_CACHE_DTYPES):
            return None  # vLLM has asked for each of them before
        kv = capability.cache_dtype(kv_cache_dtype, dtype, MLA_CACHE_DTYPES)
        rows = kv_cache_dtype == "fp8_ds_mla"
        query = mla_query_dtype(dtype, kv)
        if capability.has_mla_decode(arch, head_size, query, kv, ds_mla=rows, sparse=cls.is_sparse()):
            return None
        return f"hopwell on {arch} has no kernel for head_size {head_size} with a {kv_cache_dtype} cache and {dtype}"


@dataclass
class HopwellMLADecodeMetadata(MLACommonDecodeMetadata):
    """Metadata of the decodes of a batch.

    Attributes:
        query_start_loc: int32 [requests + 1].
        max_query_len: upper bound of the new tokens of a request.
        max_seq_len: upper bound of the keys of a request.
        workspace: scratch of the MLA entry.
    """

    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    workspace: torch.Tensor


class HopwellMLAMetadata(MLACommonMetadata[HopwellMLADecodeMetadata]):
    """Metadata of a batch."""


class HopwellMLAMetadataBuilder(MLACommonMetadataBuilder[HopwellMLAMetadata]):
    """Builds the metadata of batches. A CUDA graph of decodes replays any numbers of new tokens within its bound."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            HopwellMLAMetadata,
            supports_dcp_with_varlen=interleave == 1,
        )
        # Under DCP, lengths of this rank are computed from the lengths of all ranks in each step.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        size = mla_workspace_bytes(
            self.num_heads * self.dcp_world_size,
            vllm_config.model_config.max_model_len + self.page_size,
            self.reorder_batch_threshold,
            self.mla_dims.kv_lora_rank,
            device,
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return None
        return max_decode_query_len(vllm_config)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> HopwellMLADecodeMetadata:
        return HopwellMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max(max_query_len, 1),
            max_seq_len=max_seq_len,
            workspace=self.workspace,
        )

    def update_draft_decode_metadata(self, metadata: HopwellMLAMetadata) -> None:
        """Do nothing: the metadata has the runner's own tensors."""


class LatentLayer:
    """Mixin of layers with the constructor of vLLM's latent attention."""

    hopwell_backend: ClassVar[str]  # the name in refusals
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **mla_args: Any,
    ) -> None:
        check_features(self.hopwell_backend, alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        super().__init__(  # type: ignore[call-arg]
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        take_dtypes(self, kv_cache_dtype)


class HopwellMLAImpl(LatentLayer, MLACommonImpl[HopwellMLAMetadata]):
    """A layer. vLLM's common parts do the prefill; the decode is one call of hopwell."""

    hopwell_backend = "HOPWELL_MLA"
    can_return_lse_for_decode = True
    supports_dcp = True

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HopwellMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the latent attention of the decodes of a batch.

        Args:
            q: [tokens, heads, kv_lora_rank + qk_rope_head_dim], or its two parts.
            kv_c_and_k_pe_cache: [blocks, block_size, kv_lora_rank + qk_rope_head_dim], or rows of 656 bytes.
            attn_metadata: of the batch.
            layer: vLLM's layer, which has the scales of a quantized cache.

        Returns:
            The output [tokens, heads, kv_lora_rank], and the natural log-sum-exp [tokens, heads] with DCP.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        if decode is None:
            raise ValueError("attn_metadata must have decodes, got none")
        on_qk, on_output = layer_scales(self.scale, layer, query.dtype, self.kv_dtype)
        one_token_each = decode.max_query_len == 1 and query.shape[0] == decode.seq_lens.shape[0]
        others: dict[str, Any] = {}
        if not one_token_each:
            others = dict(cum_seq_lens_q=decode.query_start_loc, max_q_len=decode.max_query_len)
        if self.need_to_return_lse_for_decode:
            others |= dict(return_lse=True, return_lse_base="basee")
            # A single new token sees all keys of this rank, whichever they are.
            if decode.max_query_len > 1:
                others |= dict(
                    enable_dcp=True,
                    cp_world=self.dcp_world_size,
                    cp_rank=self.dcp_rank,
                    causal_seqlens_kv_global=decode.dcp_tot_seq_lens,
                )
        result: Any = hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query[:, None] if one_token_each else query,
            kv_c_and_k_pe_cache,
            decode.workspace,
            self.qk_nope_head_dim,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            decode.block_table,
            decode.seq_lens,
            decode.max_seq_len,
            bmm1_scale=on_qk,
            bmm2_scale=on_output,
            **others,
        )
        out, lse = result if self.need_to_return_lse_for_decode else (result, None)
        return (out.squeeze(1) if one_token_each else out), lse
