"""The MLA family: one or a few new tokens, with one latent key per token shared by all heads, in pages.

With 128 heads, each byte of a key takes part in enough products that tensor cores are the limit. With 16 heads, the
share of one GPU in a server of eight, memory is the limit. Titles therefore give the bytes of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from hopwell.perf import mla_candidates as known
from hopwell.perf.ceilings import MATMUL, MATMUL_8, READ
from hopwell.perf.family import Call, Family
from hopwell.perf.mla_workloads import MLA as CASES
from hopwell.perf.mla_workloads import Mla, MlaTensors
from hopwell.perf.results import Labels


def _host_calls() -> Mapping[str, Call]:
    small = MlaTensors(Mla("host", "1 x 64", (64,), heads=16))
    return {"hopwell.trtllm_batch_decode_with_kv_cache_mla": known.hopwell_paged(64)(small)}


MLA = Family(
    Labels("MLA", "TFLOP/s", "visible keys only", "keys of a request", (MATMUL, MATMUL_8, READ)),
    unit_size=1e12,
    cases=CASES,
    inputs=MlaTensors,
    candidates=known.MLA,
    host_calls=_host_calls,
)
