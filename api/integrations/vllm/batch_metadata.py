"""Metadata of a batch, as the layers of vLLM get it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionMetadata


@dataclass
class HopwellMetadata(AttentionMetadata):
    """Metadata of a batch for the layers of a KV cache group. All tensors are the runner's, on the device.

    Attributes:
        num_actual_tokens: rows of the query, padding for CUDA graphs included.
        max_query_len: upper bound of the new tokens of a request.
        max_seq_len: upper bound of ``seq_lens``.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests], keys of each request, new tokens included, on all DCP ranks.
        block_table: int32 [requests, blocks].
        slot_mapping: int64 [tokens].
        causal: whether rows see only earlier keys, a bool or a tensor [requests].
        decodes: whether the decode entry serves the batch.
        max_decode_len: bound of new tokens for the decode entry.
        one_token_each: whether row i is the only new token of request i.
        workspace: scratch of the decode entry.
        local_seq_lens: int32 [requests], keys on this DCP rank.
        local_context_lens: int32 [requests], keys in front of the new tokens on this DCP rank.
        cum_seq_lens: int32 [requests + 1], cumulative ``seq_lens``, for layers with ALiBi or a soft cap.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    decodes: bool
    max_decode_len: int
    one_token_each: bool
    workspace: torch.Tensor
    local_seq_lens: torch.Tensor | None = None
    local_context_lens: torch.Tensor | None = None
    cum_seq_lens: torch.Tensor | None = None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]
