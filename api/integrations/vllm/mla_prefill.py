"""The MLA prefill backend HOPWELL of vLLM: multi-head attention over ragged K and V."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import hopwell
from hopwell.integrations.vllm import capability


class HopwellMLAPrefillBackend(MLAPrefillBackend):
    """Prefill of DeepSeek models, selected by ``--attention-config '{"mla_prefill_backend": "HOPWELL"}'``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(capability.DTYPES)

    @staticmethod
    def get_name() -> str:
        return "HOPWELL"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return capability.arch_of(device_capability) is not None

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        arch, qk_dim = capability.arch_of(), mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        if arch is None:
            return False
        return capability.has_ragged_prefill(arch, qk_dim, mla_dimensions.v_head_dim, capability.DTYPES[0])

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention among the new tokens of each request.

        Args:
            q: [tokens, heads, qk_head_dim].
            k: the same.
            v: [tokens, heads, v_head_dim], with any strides.
            return_softmax_lse: whether to return the natural log-sum-exp, float32 [heads, tokens].
            out: [tokens, heads, v_head_dim] to write into; None allocates.
            output_scale: must be None.

        Returns:
            The output, or a pair of it and the log-sum-exp.
        """
        if output_scale is not None:
            raise NotImplementedError("HOPWELL supports 16-bit outputs of MLA prefill, got output_scale")
        new = self._prefill_metadata
        starts, longest = new.query_start_loc, new.max_query_len
        return self._attention(q, k, v, starts, longest, starts, longest, True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of new tokens to a chunk of their context, with the log-sum-exp.

        Args:
            chunk: vLLM's description of the chunk.
            q: [tokens, heads, qk_head_dim].
            k: [keys, heads, qk_head_dim].
            v: [keys, heads, v_head_dim], with any strides.
            out: [tokens, heads, v_head_dim] to write into; None allocates.

        Returns:
            The output, and the natural log-sum-exp, float32 [heads, tokens].
        """
        queries, keys = (chunk.query_start_loc, chunk.max_query_len), (chunk.cu_seq_lens, chunk.max_seq_len)
        return self._attention(q, k, v, *queries, *keys, False, True, out)

    def _attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_starts: torch.Tensor,
        max_q_len: int,
        k_starts: torch.Tensor,
        max_kv_len: int,
        causal: bool,
        return_lse: bool,
        out: torch.Tensor | None,
    ) -> Any:
        result, lse = hopwell.cudnn_batch_prefill_with_kv_cache(
            q,
            k,
            v,
            self.scale,
            q,  # a workspace is not used
            max_token_per_sequence=max_q_len,
            max_sequence_kv=max_kv_len,
            actual_seq_lens_q=None,
            actual_seq_lens_kv=None,
            causal=causal,
            return_lse=return_lse,
            batch_offsets_q=q_starts,
            batch_offsets_k=k_starts,
            batch_offsets_stats=q_starts if return_lse else None,
            out=out,
            batch_offsets_units="tokens",
            lse_layout="HN",
        )
        return (result, lse) if return_lse else result
