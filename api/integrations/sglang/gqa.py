"""Attention of models with GQA, MHA or MQA: one call of hopwell for the batch of a layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.integrations import capability
from hopwell.integrations.capability import FP8
from hopwell.integrations.sglang.backend import NAME, TREES, Batch, HopwellBackend
from hopwell.kernels.masks import MaskKind


class HopwellAttnBackend(HopwellBackend):
    """Attention over pages of K and V.

    * Decodes and the verification of drafts, chains and trees, go to ``trtllm_batch_decode_with_kv_cache``.
    * All other batches go to ``trtllm_batch_context_with_kv_cache``, and under deterministic inference decodes too.
    * Layers with a soft cap use ``trtllm_fmha_v2_prefill`` for all batches.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        for layer in self.layers:
            self._check(layer)
        self._scales: dict[int, tuple[float, float]] = {}
        lens = {1, self.draft_tokens or 1}
        # The context entry and the decode entry round differently. Deterministic inference takes one for all batches.
        self.decodes = not self.deterministic and all(
            capability.has_decode(
                self.arch, layer.head_dim, self.dtype, self.kv_dtype, q_len=n, v_head_size=layer.v_head_dim
            )
            for layer in self.layers
            for n in lens
        )
        if self.has_trees:
            self._check_trees()
        size = 0
        if self.decodes:
            size = max(
                (
                    xqa_workspace_bytes(
                        layer.tp_q_head_num,
                        layer.tp_k_head_num,
                        layer.v_head_dim,
                        self.max_kv_len,
                        max(lens),
                        self.device,
                    )
                    for layer in self.layers
                ),
                default=0,
            )
        # Layers run one after another, so all share it.
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def _check(self, layer: RadixAttention) -> None:
        """Refuse a layer that hopwell has no kernels for."""
        if layer.logit_cap > 0:
            able = layer.logit_capping_method == "tanh" and layer.v_head_dim == layer.head_dim
            able = able and capability.has_biased_scores(
                self.arch, layer.head_dim, self.dtype, self.kv_dtype, alibi=False, soft_cap=True
            )
        else:
            mask = MaskKind.CAUSAL if layer.sliding_window_size < 0 else MaskKind.SLIDING_WINDOW
            able = capability.has_prefill(
                self.arch, layer.head_dim, self.dtype, self.kv_dtype, mask=mask, v_head_size=layer.v_head_dim
            )
        if not able:
            raise NotImplementedError(
                f"{NAME} has no kernel on {self.arch} for layer {layer.layer_id} with head_dim={layer.head_dim}, "
                f"v_head_dim={layer.v_head_dim}, dtype={self.dtype}, kv_cache_dtype={self.kv_dtype}, "
                f"sliding_window_size={layer.sliding_window_size}, logit_cap={layer.logit_cap}"
            )
        for dim in (layer.head_dim, layer.v_head_dim):
            reason = capability.unaligned_rows(dim, self.kv_dtype)
            if reason is not None:
                raise NotImplementedError(f"{NAME}: {reason} in layer {layer.layer_id}")

    def _check_trees(self) -> None:
        """Refuse trees of drafts where a batch does not go to the decode entry, which alone has their masks."""
        for what, given in (
            ("deterministic inference", self.deterministic),
            ("head dims without decode kernels", not self.decodes),
            ("logit_cap", any(layer.logit_cap > 0 for layer in self.layers)),
            # A window counts keys. The keys of a tree lie at the positions of other branches, too.
            ("sliding windows", any(layer.sliding_window_size >= 0 for layer in self.layers)),
        ):
            if given:
                raise NotImplementedError(f"{NAME} does not support {TREES} with {what}")

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **keywords: Any,
    ) -> torch.Tensor:
        """Compute the attention of new tokens to their requests' keys.

        Args:
            q: [tokens or more, heads * head_dim].
            k: [tokens or more, kv_heads, head_dim] to write into the cache, or None if the cache has it.
            v: the same with v_head_dim.
            layer: SGLang's layer.
            forward_batch: of :meth:`init_forward_metadata`.
            save_kv_cache: whether to write k and v.
            sinks: float32 or bfloat16 [heads].
            **keywords: must be None.

        Returns:
            [tokens or more, heads * v_head_dim]. Rows of no request are 0.
        """
        self._refuse_keywords(keywords)
        batch = self._batch()
        if save_kv_cache and k is not None:
            loc = KVWriteLoc.for_batch(forward_batch, swa_loc=self._window_slots(batch, forward_batch))
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if q.shape[0] > batch.tokens:
            out[batch.tokens :].zero_()
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        cache = (
            paged_kv_view(k_pool, self.page_size, layer.tp_k_head_num, layer.head_dim),
            paged_kv_view(v_pool, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
        )
        call = self._biased if layer.logit_cap > 0 else self._decode if self._is_decode(batch) else self._context
        call(q[: batch.tokens], cache, batch, layer, out[: batch.tokens], sinks)
        return out.view(q.shape[0], -1)

    forward_decode = forward_extend

    def _is_decode(self, batch: Batch) -> bool:
        return self.decodes and batch.uniform

    def _window_slots(self, batch: Batch, forward_batch: Any) -> torch.Tensor | None:
        slots = batch.window_slots
        # Piecewise graphs of a prefill narrow out_cache_loc to the tokens of the batch.
        return None if slots is None else slots[: forward_batch.out_cache_loc.shape[0]]

    def _table(self, batch: Batch, layer: RadixAttention) -> torch.Tensor:
        if self.window_pool is None or batch.window_table is None:
            return batch.block_table
        _, in_window_pool = self.window_pool.layers_mapping[layer.layer_id]
        return batch.window_table if in_window_pool else batch.block_table

    def _scales_of(self, layer: RadixAttention) -> tuple[float, float]:
        """Return the factors on q k^T and on the output. The weights do not change, so it reads them once."""
        scales = self._scales.get(layer.layer_id)
        if scales is None:
            on_k = on_v = 1.0
            if self.kv_dtype is FP8:
                on_k, on_v = (
                    1.0 if given is None and tensor is None else float(tensor if given is None else given)
                    for given, tensor in (
                        (layer.k_scale_float, layer.k_scale),
                        (layer.v_scale_float, layer.v_scale),
                    )
                )
            scales = self._scales[layer.layer_id] = (layer.scaling * on_k, on_v)
        return scales

    def _decode(self, q: torch.Tensor, cache: Any, batch: Batch, layer: Any, out: torch.Tensor, sinks: Any) -> None:
        on_qk, on_output = self._scales_of(layer)
        hopwell.trtllm_batch_decode_with_kv_cache(
            q,
            cache,
            self.workspace,
            self._table(batch, layer),
            batch.seq_lens,
            batch.max_kv_len,
            on_qk,
            on_output,
            window_left=layer.sliding_window_size,
            out=out,
            sinks=sinks,
            kv_layout="NHD",
            q_len_per_req=batch.max_q_len,
            mask=batch.draft_mask,
        )

    def _context(self, q: torch.Tensor, cache: Any, batch: Batch, layer: Any, out: torch.Tensor, sinks: Any) -> None:
        on_qk, on_output = self._scales_of(layer)
        hopwell.trtllm_batch_context_with_kv_cache(
            q,
            cache,
            self.workspace,
            self._table(batch, layer),
            batch.seq_lens,
            batch.max_q_len,
            batch.max_kv_len,
            on_qk,
            on_output,
            batch.num_requests,
            batch.starts,
            batch.cum_seq_lens,
            window_left=layer.sliding_window_size,
            out=out,
            sinks=sinks,
            kv_layout="NHD",
        )

    def _biased(self, q: torch.Tensor, cache: Any, batch: Batch, layer: Any, out: torch.Tensor, sinks: Any) -> None:
        on_qk, on_output = self._scales_of(layer)
        table = self._table(batch, layer)
        hopwell.trtllm_fmha_v2_prefill(
            (q, cache),
            "Q_PAGED_KV_NHD",
            self.workspace,
            batch.seq_lens,
            batch.max_q_len,
            batch.max_kv_len,
            on_qk,
            on_output,
            batch.num_requests,
            batch.starts,
            batch.cum_seq_lens,
            block_tables=torch.stack((table, table + _pages_between(*cache)), 1),
            out=out,
            sinks=sinks,
            logits_soft_cap_scale=layer.logit_cap,
            mask_mode="causal" if layer.sliding_window_size < 0 else "sliding_window",
            window_left=layer.sliding_window_size,
        )


def _pages_between(k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the distance of K and V in pages. SGLang's pool has them in one allocation, V behind K."""
    pages, rest = divmod(v.data_ptr() - k.data_ptr(), k.stride(0) * k.element_size())
    if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr() or rest or pages < 0:
        raise NotImplementedError(
            f"{NAME} supports logit_cap where K and V of a layer are in one allocation, whole pages apart"
        )
    return pages
