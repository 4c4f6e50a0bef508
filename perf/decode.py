"""The decode family: one or a few new tokens against all their keys, in pages.

Launches follow each other without a gap, as in all measurements here. The short cases L1 and L8 therefore measure one
more layer of a step, not the time on an idle card. Keys and values that fit into the L2 cache (50 MB on an H200) come
from there.
"""

from __future__ import annotations

from collections.abc import Mapping

from hopwell.perf import decode_candidates as known
from hopwell.perf.ceilings import READ
from hopwell.perf.decode_workloads import DECODE as CASES
from hopwell.perf.decode_workloads import Decode, DecodeTensors
from hopwell.perf.family import Call, Family
from hopwell.perf.results import Labels


def _host_calls() -> Mapping[str, Call]:
    small = DecodeTensors(Decode("host", "1 x 64", (64,), heads=4, kv_heads=4))
    return {"hopwell.xqa_batch_decode_with_kv_cache": known.hopwell_paged(16)(small)}


DECODE = Family(
    # The matrix product never decides, and it lowers the clocks of the next measurement.
    Labels("decode", "GB/s", "keys and values, each read once", "keys of a request", (READ,)),
    unit_size=1e9,
    cases=CASES,
    inputs=DecodeTensors,
    candidates=known.DECODE,
    host_calls=_host_calls,
)
