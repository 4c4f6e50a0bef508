"""The layers of the backend HOPWELL: one call of hopwell for each batch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import hopwell
from hopwell.integrations.vllm import caches, capability, dcp
from hopwell.integrations.vllm.batch_metadata import HopwellMetadata
from hopwell.integrations.vllm.capability import FP8, NVFP4
from hopwell.kernels.masks import MaskKind


def layer_scale(layer: Any, name: str) -> float | torch.Tensor:
    """Return a scale of a layer: a float, or a tensor if each KV head has its own (vLLM's strategy "attn_head")."""
    scale = getattr(layer, f"_{name}_scale")
    return scale if scale.numel() > 1 else getattr(layer, f"_{name}_scale_float")


class HopwellImpl(AttentionImpl[HopwellMetadata]):
    """A decoder layer.

    * Batches of decodes go to ``trtllm_batch_decode_with_kv_cache``, other batches to
      ``trtllm_batch_context_with_kv_cache``.
    * Layers with ALiBi or a soft cap use ``trtllm_fmha_v2_prefill`` for all batches.
    * Queries over an e4m3 cache arrive in e4m3, except with DCP.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"HOPWELL supports decoder layers, got attn_type={attn_type}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.soft_cap = logits_soft_cap or 0.0
        self.has_alibi = alibi_slopes is not None
        self.has_biased_scores = self.has_alibi or self.soft_cap > 0
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"sinks must have one element for each of {num_heads} heads, got {tuple(sinks.shape)}")
        self.sinks = sinks
        self.dtype = torch.get_default_dtype()
        self.kv_dtype = capability.cache_dtype(kv_cache_dtype, self.dtype)
        self.supports_quant_query_input = self.kv_dtype is FP8 and self.dcp_world_size == 1
        self._check(alibi_slopes)
        self._combine: Any = dcp.combine_function() if self.dcp_world_size > 1 else None
        self._scales: tuple[float | torch.Tensor, float | torch.Tensor] | None = None
        self._quantized_output_scale: torch.Tensor | None = None

    def _check(self, alibi_slopes: list[float] | None) -> None:
        """Refuse layers that hopwell has no kernels for."""
        arch = capability.arch_of()
        if arch is None:
            raise NotImplementedError("hopwell has no kernels for this device")
        if self.dcp_world_size > 1:
            for what, given in (
                ("a sliding window", self.window_left >= 0),
                ("attention sinks", self.sinks is not None),
                ("ALiBi or a soft cap", self.has_biased_scores),
            ):
                if given:
                    raise NotImplementedError(f"HOPWELL does not support {what} with DCP")
        query = FP8 if self.supports_quant_query_input else self.dtype
        if not self.has_biased_scores:
            mask = MaskKind.CAUSAL if self.window_left < 0 else MaskKind.SLIDING_WINDOW
            able = capability.has_prefill(
                arch, self.head_size, query, self.kv_dtype, mask=mask, sinks=self.sinks is not None
            )
        else:
            able = capability.has_biased_scores(
                arch, self.head_size, query, self.kv_dtype, alibi=self.has_alibi, soft_cap=self.soft_cap > 0
            )
        if not able:
            raise NotImplementedError(
                f"hopwell on {arch} has no kernel for head_size={self.head_size}, kv_cache_dtype={self.kv_cache_dtype} "
                f"and {self.dtype}, with sliding_window={self.window_left + 1 or None}, "
                f"sinks={self.sinks is not None}, alibi={self.has_alibi}, logits_soft_cap={self.soft_cap or None}"
            )
        reason = capability.unaligned_rows(self.head_size, self.kv_dtype)
        if reason is not None:
            raise NotImplementedError(f"HOPWELL: {reason}")
        if alibi_slopes is not None:
            _check_slopes(alibi_slopes, self.num_heads)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None and self.sinks.dtype not in (torch.float32, torch.bfloat16):
            self.sinks = self.sinks.float()

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return quant_key == kFp8StaticTensorSym and self.supports_quant_query_input

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        cache = caches.cache_of(kv_cache, self.kv_dtype, self.head_size, self.num_kv_heads)
        quantized = self.kv_dtype in (FP8, NVFP4)
        k_scale, v_scale = (layer_scale(layer, "k"), layer_scale(layer, "v")) if quantized else (1.0, 1.0)
        caches.write(cache, key, value, slot_mapping, k_scale, v_scale)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: HopwellMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of a batch into ``output``.

        Args:
            layer: vLLM's layer, which has the scales of a quantized cache.
            query: [tokens or more, num_heads, head_size].
            key: [tokens or more, num_kv_heads, head_size]; only DCP reads it, the cache has it already.
            value: the same.
            kv_cache: of the layer, see :func:`hopwell.integrations.vllm.caches.cache_of`.
            attn_metadata: of the batch, or None in vLLM's profiling run, which gets zeros.
            output: [tokens or more, num_heads, head_size] in the dtype of the model, or e4m3 with ``output_scale``.
            output_scale: float32 [1], divisor of an e4m3 output.
            output_block_scale: must be None.

        Returns:
            ``output``.
        """
        if output_block_scale is not None:
            raise NotImplementedError("HOPWELL supports e4m3 outputs with one scale, got output_block_scale")
        if attn_metadata is None:
            return output.fill_(0)
        meta, tokens = attn_metadata, attn_metadata.num_actual_tokens
        query, out = query[:tokens], output[:tokens]
        scales = self._scales_of(layer, query.dtype, output_scale)
        if self.dcp_world_size > 1:
            if key is None or value is None:
                raise NotImplementedError("HOPWELL with DCP needs key and value: layers may not share caches")
            self._forward_dcp(query, key[:tokens], value[:tokens], kv_cache, meta, out, scales)
        elif self.has_biased_scores:
            self._biased(query, kv_cache, meta, out, scales)
        elif meta.decodes:
            self._decode(query, kv_cache, meta, out, scales)
        else:
            self._context(query, kv_cache, meta, out, scales)
        return output

    def _scales_of(self, layer: Any, dtype: torch.dtype, output_scale: torch.Tensor | None) -> tuple[Any, Any]:
        """Return the factors on q k^T and on the output. They are constants after the weights are loaded."""
        if self._scales is None:
            on_qk: float | torch.Tensor = self.scale
            on_output: float | torch.Tensor = 1.0
            if self.kv_dtype in (FP8, NVFP4):
                on_qk, on_output = on_qk * layer_scale(layer, "k"), layer_scale(layer, "v")
            self._scales = on_qk * (layer_scale(layer, "q") if dtype is FP8 else 1.0), on_output
        if output_scale is None:
            return self._scales
        if self._quantized_output_scale is None:
            self._quantized_output_scale = (self._scales[1] / output_scale.float()).flatten()
        return self._scales[0], self._quantized_output_scale

    def _decode(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: HopwellMetadata, out: Any, scales: Any, **others: Any
    ) -> Any:
        cache = caches.cache_of(kv_cache, self.kv_dtype, self.head_size, self.num_kv_heads)
        ragged: dict[str, Any] = dict(cum_seq_lens_q=meta.query_start_loc, max_q_len=meta.max_decode_len)
        return hopwell.trtllm_batch_decode_with_kv_cache(
            query,
            cache.data,
            meta.workspace,
            meta.block_table,
            meta.seq_lens if meta.local_seq_lens is None else meta.local_seq_lens,
            meta.max_seq_len,
            scales[0],
            scales[1],
            window_left=self.window_left,
            out=out,
            sinks=self.sinks,
            kv_layout="HND",
            kv_cache_sf=cache.scales,
            **({} if meta.one_token_each else ragged),
            **others,
        )

    def _context(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: HopwellMetadata, out: Any, scales: Any, **others: Any
    ) -> Any:
        cache = caches.cache_of(kv_cache, self.kv_dtype, self.head_size, self.num_kv_heads)
        self._check_mask(meta)
        call: dict[str, Any] = dict(seq_lens=meta.seq_lens, causal=meta.causal, window_left=self.window_left)
        if cache.scales is not None:
            call["v_scale_layout"] = "linear"
        return hopwell.trtllm_batch_context_with_kv_cache(
            query,
            cache.data,
            meta.workspace,
            meta.block_table,
            max_q_len=meta.max_query_len,
            max_kv_len=meta.max_seq_len,
            bmm1_scale=scales[0],
            bmm2_scale=scales[1],
            batch_size=meta.num_requests,
            cum_seq_lens_q=meta.query_start_loc,
            cum_seq_lens_kv=meta.query_start_loc,  # not read: seq_lens has the lengths
            out=out,
            sinks=self.sinks,
            kv_layout="HND",
            kv_block_scales=cache.scales,
            **(call | others),
        )

    def _check_mask(self, meta: HopwellMetadata) -> None:
        if self.window_left >= 0 and meta.causal is not True:
            raise NotImplementedError("HOPWELL does not support non-causal attention with a sliding window")

    def _biased(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: HopwellMetadata, out: Any, scales: Any
    ) -> None:
        """Serve layers with ALiBi or a soft cap."""
        self._check_mask(meta)
        if isinstance(meta.causal, torch.Tensor):
            raise NotImplementedError("HOPWELL does not support causal masks by request with ALiBi or a soft cap")
        if isinstance(scales[0], torch.Tensor):
            raise NotImplementedError("HOPWELL does not support scales of each KV head with ALiBi or a soft cap")
        if meta.cum_seq_lens is None:
            raise ValueError("the metadata must have cum_seq_lens for layers with ALiBi or a soft cap, got None")
        mask = "padding" if not meta.causal else "causal" if self.window_left < 0 else "sliding_window"
        hopwell.trtllm_fmha_v2_prefill(
            (query, caches.stacked(kv_cache, self.kv_dtype, self.head_size)),
            "Q_PAGED_KV_HND",
            meta.workspace,
            meta.seq_lens,
            meta.max_query_len,
            meta.max_seq_len,
            scales[0],
            scales[1],
            meta.num_requests,
            meta.query_start_loc,
            meta.cum_seq_lens,
            block_tables=meta.block_table,
            out=out,
            sinks=self.sinks,
            pos_encoding_mode="alibi" if self.has_alibi else None,
            logits_soft_cap_scale=self.soft_cap,
            mask_mode=mask,
            window_left=self.window_left,
        )

    def _forward_dcp(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: HopwellMetadata,
        out: torch.Tensor,
        scales: Any,
    ) -> None:
        """Attend with all heads to the keys of this rank, and combine the ranks' results by their log-sum-exp."""
        everywhere = dcp.all_heads(query)
        if meta.decodes:
            of_ranks: dict[str, Any] = {}
            if meta.max_query_len > 1:
                of_ranks = dict(
                    cp_world=self.dcp_world_size, cp_rank=self.dcp_rank, causal_seqlens_kv_global=meta.seq_lens
                )
            part = self._decode(
                everywhere, kv_cache, meta, None, scales, return_lse=True, return_lse_base="basee", **of_ranks
            )
            out.copy_(self._combine(*part))
            return
        # The cached context of all ranks, and the new tokens, which each rank has.
        part = self._context(
            everywhere,
            kv_cache,
            meta,
            None,
            scales,
            seq_lens=meta.local_context_lens,
            causal=False,
            return_lse=True,
            lse_base="ln",
        )
        context, context_lse = self._combine(*part, return_lse=True)
        dcp.add_new_tokens(out, context, context_lse, query, key, value, meta, self.scale)


def _check_slopes(slopes: list[float], heads: int) -> None:
    """Refuse ALiBi slopes except the usual ones, which hopwell computes itself."""
    power = 1 << (heads.bit_length() - 1)
    usual = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    usual += [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]
    if not torch.allclose(torch.tensor(slopes), torch.tensor(usual), rtol=1e-4, atol=0):
        raise NotImplementedError(
            f"HOPWELL supports the usual ALiBi slopes of {heads} heads, got {list(slopes)}; tensor parallelism gives a "
            "rank other slopes"
        )
