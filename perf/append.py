"""The append family: new keys and values written into the pages of a cache.

Steps are short launches, back to back, like further layers of a model. The data that a step writes is in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from hopwell.perf import append_candidates as known
from hopwell.perf.append_workloads import APPEND as CASES
from hopwell.perf.append_workloads import Append, AppendTensors
from hopwell.perf.ceilings import READ
from hopwell.perf.family import Call, Family
from hopwell.perf.results import Labels


def _host_calls() -> Mapping[str, Call]:
    return {"hopwell.append_paged_kv_cache": known.hopwell_paged(16)(AppendTensors(Append("host", 4, 1)))}


APPEND = Family(
    Labels("append", "GB/s", "new tokens read, and what is written of them", "new tokens", (READ,)),
    unit_size=1e9,
    cases=CASES,
    inputs=AppendTensors,
    candidates=known.APPEND,
    host_calls=_host_calls,
)
