"""Attention of models with multi-head latent attention (DeepSeek, Kimi)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_row_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common import attention_backend_handler as methods

import hopwell
from hopwell.integrations import capability
from hopwell.integrations.sglang.backend import NAME, TREES, HopwellBackend
from hopwell.mla import mla_workspace_bytes

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class HopwellMLABackend(HopwellBackend):
    """Attention over a latent cache, and of new tokens over ragged K and V.

    * Decodes, the verification of drafts and absorbed prefill go to ``trtllm_batch_decode_with_kv_cache_mla``.
    * Prefill goes to ``cudnn_batch_prefill_with_kv_cache``. SGLang expands a cached prefix in chunks and merges them.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        config = runner.model_config
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_dim, self.v_dim = config.kv_lora_rank, config.v_head_dim
        self._check(runner)
        heads = max((layer.tp_q_head_num for layer in self.layers), default=1)
        size = mla_workspace_bytes(heads, self.max_kv_len, self.draft_tokens or 1, self.latent_dim, self.device)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.deterministic:
            hopwell.batch_invariant(True)
        # Ragged prefill, except under deterministic inference, where all batches take absorbed attention.
        handler = methods.handle_attention_fa3 if self.deterministic else methods.handle_attention_trtllm_mla
        methods.AttentionBackendRegistry.register("hopwell", handler)

    def _check(self, runner: Any) -> None:
        """Refuse a model that hopwell has no kernels for."""
        row, qk_dim = self.latent_dim + self.rope_dim, self.nope_dim + self.rope_dim
        if not capability.has_mla_decode(self.arch, row, self.dtype, self.kv_dtype):
            raise NotImplementedError(
                f"{NAME} has no kernel on {self.arch} for kv_lora_rank={self.latent_dim}, "
                f"qk_rope_head_dim={self.rope_dim}, dtype={self.dtype} and kv_cache_dtype={self.kv_dtype}"
            )
        if not capability.has_ragged_prefill(self.arch, qk_dim, self.v_dim, self.dtype):
            raise NotImplementedError(
                f"{NAME} has no kernel on {self.arch} for prefill with qk_head_dim={qk_dim} and v_head_dim={self.v_dim}"
            )
        for layer in self.layers:
            for what, given in (
                (f"sliding_window_size={layer.sliding_window_size}", layer.sliding_window_size >= 0),
                (f"logit_cap={layer.logit_cap}", layer.logit_cap > 0),
            ):
                if given:
                    raise NotImplementedError(f"{NAME} does not support {what} with MLA")
        if self.has_trees:
            raise NotImplementedError(f"{NAME} does not support {TREES} with MLA")
        if any(getattr(module, "learnable_sink_param", None) is not None for module in runner.model.modules()):
            raise NotImplementedError(f"{NAME} does not support attention sinks with MLA")

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Output:
        """Compute the attention of new tokens.

        Args:
            q: [tokens or more, heads * head_dim]; the latent part alone if ``q_rope`` is given.
            k: latent rows to write into the cache, or ragged [keys, heads, head_dim].
            v: ragged [keys, heads, v_head_dim]; not read in latent attention.
            layer: SGLang's layer. A layer of ragged attention has a head_dim of its own.
            forward_batch: of :meth:`init_forward_metadata`.
            save_kv_cache: whether to write k.
            q_rope: [tokens or more, heads, qk_rope_head_dim].
            k_rope: rotary part of the latent rows, if k does not have it.
            **keywords: must be None.

        Returns:
            [tokens or more, heads * v_head_dim]. With a cached prefix in chunks a pair: the output [tokens, heads,
            v_head_dim], and the natural log-sum-exp float32 [tokens, heads].
        """
        self._refuse_keywords(keywords)
        if layer.head_dim != self.latent_dim + self.rope_dim:
            return self._ragged(q, k, v, layer, forward_batch)
        if save_kv_cache:
            self._write(k, k_rope, layer, forward_batch)
        return self._latent(q, q_rope, layer)

    forward_decode = forward_extend

    def _write(self, k: torch.Tensor, k_rope: torch.Tensor | None, layer: RadixAttention, forward_batch: Any) -> None:
        loc = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, k)  # the pool takes whole rows from k
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, k, k_rope)

    def _latent(self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: RadixAttention) -> torch.Tensor:
        batch, heads = self._batch(), layer.tp_q_head_num
        if q_rope is not None:
            q = torch.cat([q.view(-1, heads, self.latent_dim), q_rope.view(-1, heads, self.rope_dim)], -1)
        q = q.view(-1, heads, layer.head_dim)
        out = q.new_empty(q.shape[0], heads, self.latent_dim)
        if q.shape[0] > batch.tokens:
            out[batch.tokens :].zero_()
        query, result = q[: batch.tokens], out[: batch.tokens]
        ragged: dict[str, Any] = dict(cum_seq_lens_q=batch.starts, max_q_len=batch.max_q_len)
        if batch.uniform:
            query, result = (x.unflatten(0, (batch.num_requests, batch.max_q_len)) for x in (query, result))
            ragged = {}
        hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query,
            paged_row_view(self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.page_size),
            self.workspace,
            self.nope_dim,
            self.latent_dim,
            self.rope_dim,
            batch.block_table,
            batch.seq_lens,
            batch.max_kv_len,
            out=result,
            bmm1_scale=layer.scaling,  # the pool casts rows to e4m3 and does not scale them
            **ragged,
        )
        return out.view(q.shape[0], -1)

    def _ragged(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any) -> Output:
        """Attend to the new tokens, or to a chunk of the cached prefix, as ragged K and V."""
        batch, heads = self._batch(), layer.tp_q_head_num
        q = q.view(-1, heads, layer.head_dim)
        k, v = k.view(-1, heads, layer.head_dim), v.view(-1, heads, layer.v_head_dim)
        prefix = bool(forward_batch.attn_attend_prefix_cache)
        starts, longest = batch.starts, batch.max_q_len
        if prefix:
            chunk = forward_batch.prefix_chunk_idx
            starts = forward_batch.prefix_chunk_cu_seq_lens[chunk]
            longest = forward_batch.prefix_chunk_max_seq_lens[chunk]
        with_lse = prefix or bool(forward_batch.mha_return_lse)
        out = q.new_empty(q.shape[0], heads, layer.v_head_dim)
        lse = q.new_empty(q.shape[0], heads, dtype=torch.float32) if with_lse else None
        if q.shape[0] > batch.tokens:
            out[batch.tokens :].zero_()
            if lse is not None:
                lse[batch.tokens :].fill_(-float("inf"))
        hopwell.cudnn_batch_prefill_with_kv_cache(
            q,
            k,
            v,
            layer.scaling,
            self.workspace,
            max_token_per_sequence=batch.max_q_len,
            max_sequence_kv=max(int(longest), 1),
            actual_seq_lens_q=None,
            actual_seq_lens_kv=None,
            causal=not prefix,
            return_lse=with_lse,
            batch_offsets_q=batch.starts,
            batch_offsets_k=starts,
            batch_offsets_stats=batch.starts if with_lse else None,
            out=out,
            lse=lse,
            batch_offsets_units="tokens",
        )
        return out.view(q.shape[0], -1) if lse is None else (out, lse)
