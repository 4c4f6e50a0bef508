"""The parts that GQA and MLA share: the metadata of a batch, CUDA graphs, and the configurations that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec

import hopwell
from hopwell.integrations.capability import DTYPES, FP8
from hopwell.kernels import support

NAME = "hopwell's attention backend for SGLang"
TREES = "trees of drafts (speculative_eagle_topk > 1)"


@dataclass
class Batch:
    """Metadata of a batch. All tensors are on the device.

    Attributes:
        seq_lens: int32 [requests], keys of each request, new tokens included.
        starts: int32 [requests + 1], the first token of each request.
        block_table: int32 [requests, pages].
        window_table: the same for the pool of layers with a sliding window, or None where all layers share a pool.
        window_slots: int64 [tokens], slots of the new tokens in this pool.
        cum_seq_lens: int32 [requests + 1], cumulative ``seq_lens``.
        max_q_len: upper bound of the new tokens of a request.
        max_kv_len: upper bound of ``seq_lens``.
        tokens: the new tokens of all requests; queries may have more rows.
        new_keys: keys of each request that SGLang's lengths do not count.
        uniform: whether all requests have ``max_q_len`` new tokens.
        draft_mask: uint16 [requests, max_q_len, words], the new tokens that each new token of a tree of drafts sees.
            The decode entry takes it. None stands for a causal mask.
    """

    seq_lens: torch.Tensor
    starts: torch.Tensor
    block_table: torch.Tensor
    window_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    cum_seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    tokens: int
    new_keys: int
    uniform: bool
    draft_mask: torch.Tensor | None

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


class HopwellBackend(AttentionBackend):
    """Base of the backends. It computes the metadata of a batch on the device, without a copy to or from the host.

    hopwell reads all lengths on the device, and bounds never change a result. A CUDA graph records the computation of
    the metadata too and replays any lengths.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = torch.device(runner.device)
        self.dtype, self.kv_dtype = runner.dtype, runner.kv_cache_dtype
        self.page_size = runner.page_size
        # SGLang reads both pools, and the longest request, from the backend.
        self.max_context_len = runner.model_config.context_len
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.window_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self.draft_tokens = get_spec().speculative_num_draft_tokens or 0
        self.has_trees = (get_spec().speculative_eagle_topk or 0) > 1
        self._verify_mask = self._empty_verify_mask(0)
        self.deterministic = bool(runner.server_args.enable_deterministic_inference)
        self.layers = [one for one in runner.model.modules() if isinstance(one, RadixAttention)]
        self.arch = support.arch_of(self.device)
        self._refuse(runner)
        # SGLang's table has one slot for each token. Pages start at every page_size-th slot.
        table = self.req_to_token_pool.req_to_token
        self.max_kv_len = min(self.max_context_len + self.draft_tokens, table.shape[1])
        self.page_starts = table[:, : self.max_kv_len : self.page_size]
        self.forward_metadata: Batch | None = None
        self._graph_buffers: Batch | None = None
        self._graph_batches: dict[tuple[int, int], Batch] = {}

    def _refuse(self, runner: Any) -> None:
        """Raise NotImplementedError for configurations that hopwell does not serve."""
        if self.dtype not in DTYPES or self.kv_dtype not in (*DTYPES, FP8):
            raise NotImplementedError(
                f"{NAME} serves bfloat16 and float16 models with caches in bfloat16, float16 and float8_e4m3fn, got "
                f"dtype={self.dtype} and kv_cache_dtype={self.kv_dtype}"
            )
        parallel = get_parallel()
        for what, given in (
            ("decode context parallelism", parallel.dcp_enabled),
            ("context parallelism of attention", parallel.attn_cp_size > 1),
            (f"{TREES} of NGRAM", self.has_trees and (get_spec().speculative_algorithm or "").upper() == "NGRAM"),
            ("unified memory", runner.server_args.enable_unified_memory),
            ("encoder-decoder models", runner.model_config.is_encoder_decoder),
        ):
            if given:
                raise NotImplementedError(f"{NAME} does not support {what}")
        for layer in self.layers:
            for what, given in (
                (f"attn_type={layer.attn_type}", layer.attn_type != AttentionType.DECODER),
                ("cross-attention", layer.is_cross_attention),
                ("chunked local attention (use_irope)", layer.use_irope),
                (f"pos_encoding_mode={layer.pos_encoding_mode}", layer.pos_encoding_mode != "NONE"),
                (f"xai_temperature_len={layer.xai_temperature_len}", layer.xai_temperature_len > 0),
            ):
                if given:
                    raise NotImplementedError(f"{NAME} does not support {what}, as layer {layer.layer_id} has it")

    # --- metadata ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute the metadata of a batch outside CUDA graphs."""
        batch = self._allocated(forward_batch)
        self._fill(batch, forward_batch)
        if batch.draft_mask is not None:
            self._fill_draft_mask(batch, forward_batch.spec_info.custom_mask)
        self.forward_metadata = batch

    def _allocated(self, forward_batch: Any) -> Batch:
        """Return metadata for the sizes of a batch, with tensors that :meth:`_fill` fills."""
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        new_keys = 0
        if mode.is_decode_or_idle() or mode.is_target_verify():
            q_len, new_keys = self._uniform_lens(forward_batch)
            tokens, longest = requests * q_len, self.max_kv_len
            if forward_batch.seq_lens_cpu is not None and requests:
                longest = min(int(forward_batch.seq_lens_cpu.max()) + new_keys, longest)
            uniform = True
        else:
            new, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
            q_len, tokens, uniform = max(new), sum(new), False
            longest = self.max_kv_len if cached is None else max(map(sum, zip(new, cached, strict=True)))
        slots = 0 if forward_batch.out_cache_loc is None else forward_batch.out_cache_loc.shape[0]
        batch = self._empty(requests, -(-max(longest, 1) // self.page_size), slots)
        batch.max_q_len, batch.max_kv_len, batch.tokens = q_len, max(longest, 1), tokens
        batch.new_keys, batch.uniform, batch.draft_mask = new_keys, uniform, self._draft_mask(requests, new_keys)
        if uniform:
            torch.arange(0, tokens + 1, q_len, out=batch.starts)
        return batch

    def _uniform_lens(self, forward_batch: Any) -> tuple[int, int]:
        """Return the new tokens of each request of a decode, and how many of them SGLang's lengths do not count."""
        spec = forward_batch.spec_info
        if not forward_batch.forward_mode.is_target_verify():
            if spec is not None and spec.is_draft_input():
                raise NotImplementedError(
                    f"{NAME} verifies drafts and does not make them: choose --speculative-draft-attention-backend"
                )
            return 1, 0
        if getattr(spec, "ragged_verify_layout", None) is not None:
            raise NotImplementedError(f"{NAME} does not support drafts of different lengths (ragged verify)")
        return spec.draft_token_num, spec.draft_token_num

    def _empty(self, requests: int, pages: int, slots: int) -> Batch:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        windows = self.window_pool is not None
        return Batch(
            seq_lens=zeros(requests),
            starts=zeros(requests + 1),
            block_table=zeros(requests, pages),
            window_table=zeros(requests, pages) if windows else None,
            window_slots=zeros(slots, dtype=torch.int64) if windows else None,
            cum_seq_lens=zeros(requests + 1),
            max_q_len=1,
            max_kv_len=self.max_kv_len,
            tokens=requests,
            new_keys=0,
            uniform=True,
            draft_mask=None,
        )

    def _draft_mask(self, requests: int, drafts: int) -> torch.Tensor | None:
        """Return a causal mask of drafts, for :meth:`_fill_draft_mask`, or None without trees of drafts."""
        if not self.has_trees or drafts < 2:
            return None
        causal = torch.ones(1, drafts, drafts, dtype=torch.bool, device=self.device).tril()
        return hopwell.decode.pack_mask(causal).repeat(requests, 1, 1)

    def _fill_draft_mask(self, batch: Batch, tree: torch.Tensor) -> None:
        """Pack SGLang's mask of a tree of drafts: bool [requests or more, tokens, tokens], flat.

        Padded requests of a batch have no part in it.
        """
        assert batch.draft_mask is not None
        of_request = batch.max_q_len * batch.max_q_len
        requests = min(batch.num_requests, tree.numel() // of_request)
        visible = tree[: requests * of_request].view(requests, batch.max_q_len, batch.max_q_len)
        batch.draft_mask[:requests].copy_(hopwell.decode.pack_mask(visible))

    def _fill(self, batch: Batch, forward_batch: Any) -> None:
        """Compute the tensors of the metadata on the device. A CUDA graph can record it."""
        requests, pages = batch.block_table.shape
        batch.seq_lens.copy_(forward_batch.seq_lens[:requests])
        if batch.new_keys:
            batch.seq_lens.add_(batch.new_keys)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=batch.cum_seq_lens[1:])
        if not batch.uniform:
            new = forward_batch.extend_seq_lens[:requests]
            torch.cumsum(new, 0, dtype=torch.int32, out=batch.starts[1:])
        slots = self.page_starts[:, :pages].index_select(0, forward_batch.req_pool_indices[:requests])
        batch.block_table.copy_(slots // self.page_size)
        if batch.window_table is not None and batch.window_slots is not None and self.window_pool is not None:
            of_window = self.window_pool.translate_loc_from_full_to_swa
            # Pages that left the window have no slot. Attention does not read them.
            batch.window_table.copy_((of_window(slots) // self.page_size).clamp_(min=0))
            new_slots = forward_batch.out_cache_loc
            if new_slots is not None:
                batch.window_slots[: new_slots.shape[0]].copy_(of_window(new_slots))

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the metadata of all graphs, for up to ``max_bs`` requests and ``max_num_tokens`` new tokens."""
        self._graph_buffers = self._empty(max_bs, self.page_starts.shape[1], max_num_tokens)
        self._graph_batches = {}
        self._verify_mask = self._empty_verify_mask(max_bs)

    def _empty_verify_mask(self, max_bs: int) -> VerifyMask | None:
        """Return the memory that SGLang writes the drafts of up to ``max_bs`` requests into, chains too.

        Without it, SGLang writes masks with the prefixes of the requests, which are large. SGLang allocates for batches
        with more requests, which no graph replays.
        """
        if not self.draft_tokens:
            return None
        shape = max_bs * self.draft_tokens * self.draft_tokens
        buffer = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs, is_read=self.has_trees)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The memory that SGLang writes masks of drafts into, or None without drafts."""
        return self._verify_mask

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Select the metadata of the graph that is captured or replayed."""
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(f"{NAME} has CUDA graphs of decodes and of target verify, got {mode}")
        q_len, new_keys = self._uniform_lens(forward_batch)
        if in_capture:
            self._graph_batches[requests, q_len] = self._of_graph(requests, q_len, new_keys)
        self.forward_metadata = self._graph_batches[requests, q_len]

    def _of_graph(self, requests: int, q_len: int, new_keys: int) -> Batch:
        """Return the metadata of a graph in the shared buffers."""
        every = self._graph_buffers
        if every is None:
            raise RuntimeError("init_cuda_graph_state must run before a capture")
        tokens = requests * q_len
        return Batch(
            seq_lens=every.seq_lens[:requests],
            starts=torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device=self.device),
            block_table=every.block_table[:requests],
            window_table=None if every.window_table is None else every.window_table[:requests],
            window_slots=None if every.window_slots is None else every.window_slots[:tokens],
            cum_seq_lens=every.cum_seq_lens[: requests + 1],
            max_q_len=q_len,
            max_kv_len=self.max_kv_len,
            tokens=tokens,
            new_keys=new_keys,
            uniform=True,
            draft_mask=self._draft_mask(requests, new_keys),
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute the metadata inside the graph."""
        batch = self._batch()
        self._fill(batch, forward_batch)
        if batch.draft_mask is not None and self._verify_mask is not None:
            self._fill_draft_mask(batch, self._verify_mask.buffer)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the keys of padded requests."""
        return 1

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Pack the mask of a tree again. A graph does so itself."""
        batch = self._batch()
        if batch.draft_mask is not None and cuda_graph_bs is None:
            self._fill_draft_mask(batch, spec_info.custom_mask)

    def _batch(self) -> Batch:
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata must run before the layers")
        return self.forward_metadata

    def _refuse_keywords(self, keywords: dict[str, Any]) -> None:
        given = [name for name, value in keywords.items() if value is not None and value is not False]
        if given:
            raise NotImplementedError(f"{NAME} does not support the keywords {', '.join(given)} of a layer")
