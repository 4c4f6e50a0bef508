"""The prefill family: new tokens at the ends of their keys."""

from __future__ import annotations

from collections.abc import Mapping

from hopwell.perf import prefill_candidates as known
from hopwell.perf.ceilings import MATMUL, MATMUL_8, READ
from hopwell.perf.family import Call, Family
from hopwell.perf.prefill_workloads import PREFILL as CASES
from hopwell.perf.prefill_workloads import Prefill, Tensors
from hopwell.perf.results import Labels


def _host_calls() -> Mapping[str, Call]:
    """Return a warm call of each entry, with a problem small enough that the host takes longer than the GPU."""
    sizes = ("host", "1 x 64", (64,), (64,), 4, 4, 128, 128)
    causal, full = (Tensors(Prefill(*sizes, causal=is_causal)) for is_causal in (True, False))
    return {
        "hopwell.trtllm_batch_context_with_kv_cache": known.hopwell_paged(16)(causal),
        "hopwell.trtllm_fmha_v2_prefill": known.hopwell_dense(causal),
        "hopwell.cudnn_batch_prefill_with_kv_cache": known.hopwell_paged(16)(full),
        "torch SDPA (cuDNN)": known.PREFILL["cuDNN SDPA"](causal),
    }


PREFILL = Family(
    Labels("prefill", "TFLOP/s", "a causal mask counts half", "sequence length", (MATMUL, MATMUL_8, READ)),
    unit_size=1e12,
    cases=CASES,
    inputs=Tensors,
    candidates=known.PREFILL,
    host_calls=_host_calls,
    remarks={"hopwell": known.left_out},
)
