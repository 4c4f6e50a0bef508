"""Context calls whose requests have masks of their own: a causal launch, and one without a mask for the other requests.

Each launch sees the requests of the other one as requests without queries, so it writes none of their rows. The lengths
of queries are computed on the device, and the host does not wait. A request has the same bits as in a call of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hopwell._calls.launch import ANY_BOUND, Calls, halves, single
from hopwell._calls.repeat import Arguments, OperandMap, Results, output_parts
from hopwell._checks import arguments as checks
from hopwell._checks import windows
from hopwell._entries.context import CONTEXT_OPERANDS, ContextCall, context_problem, results
from hopwell.kernels.launch.device_data import signed

CAUSAL_TYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)
LENGTHS = "lengths of cum_seq_lens_q"  # their name in messages
# Arguments that a repeated call compares in another form.
CONVERTED = {
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "max_kv_len",
    "bmm1_scale",
    "bmm2_scale",
    "cum_seq_lens_q",
    "out",
    "sinks",
    "kv_block_scales",
    "kv_cache_sf",
    "multi_ctas_kv_counter_buffer",
    "backend",
}


class ContextByRequest:
    """Launches context calls with a tensor ``causal``, and repeats checked calls without checks."""

    def __init__(self) -> None:
        operands = {**CONTEXT_OPERANDS.operands, "q_lens": LENGTHS}
        self._calls = Calls(OperandMap((*CONTEXT_OPERANDS.tensors, LENGTHS), operands))

    def run(self, call: ContextCall) -> Results:
        """Launch a call and return its results."""
        causal, others = _query_lengths(call)
        out, stats = self._part(call._replace(causal=True), causal)
        return self._part(call._replace(causal=False, out=out, lse=stats if call.return_lse else call.lse), others)

    def _part(self, call: ContextCall, lengths: torch.Tensor) -> Results:
        arguments = _arguments(call, lengths)
        done = self._calls.latest(arguments, call.out, call.lse) or self._calls.repeat(arguments, call.out, call.lse)
        if done is None:
            problem = replace(context_problem(call), q_lens=lengths)
            renamed = None if call.kv_cache_sf is None else {"kv_block_scales": "kv_cache_sf"}
            done = self._calls.run(arguments, call, problem, *results(call, problem), renamed=renamed)
        return done


def _query_lengths(call: ContextCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new tokens of each request that is causal, 0 for the others, and the reverse."""
    on = checks.main_tensor("query", call.query).device
    batch = checks.host_int("batch_size", call.batch_size)
    starts = signed(checks.cumulative("cum_seq_lens_q", call.cum_seq_lens_q, batch, on).tensor.view(-1))
    causal = checks.tensor("causal", call.causal, "True, False or a torch.Tensor")
    checks.dtype("causal", causal, CAUSAL_TYPES)
    checks.shape("causal", causal, ("batch_size", batch))
    checks.device("causal", causal, on)
    if checks.host_int("window_left", call.window_left, minimum=-1) >= 0:
        raise ValueError(f"window_left must be -1 where causal is a tensor, got {call.window_left}")
    windows.right_of_causal(call.window_right, "where causal is a tensor")
    lengths = starts.diff().int()
    own = torch.where(causal != 0, lengths, 0)
    return own, lengths - own


def _arguments(call: ContextCall, lengths: torch.Tensor) -> Arguments:
    """Return the arguments in the form that repeated calls compare."""
    is_bound = type(call.max_kv_len) is int and 0 <= call.max_kv_len <= checks.INT32_MAX
    scales = call.kv_block_scales if call.kv_cache_sf is None else call.kv_cache_sf
    return (
        call.query,
        *halves(call.kv_cache),
        call.block_tables,
        call.seq_lens,
        call.cum_seq_lens_q,
        call.bmm1_scale,
        call.bmm2_scale,
        single(call.sinks),
        *halves(scales),
        lengths,
        *output_parts(call.out),
        call.kv_block_scales is None,
        call.kv_cache_sf is None,
        ANY_BOUND if is_bound else call.max_kv_len,
        *(type(part) for part in (call.workspace_buffer, call.multi_ctas_kv_counter_buffer, call.backend)),
        *(value for name, value in call._asdict().items() if name not in CONVERTED),
    )
