"""The kernels that a sweep will launch, found without a GPU: calls are made on the CPU, and stop short of a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from hopwell.kernels.append import plan as append_plan
from hopwell.kernels.launch import plan
from hopwell.kernels.registry import Buildable
from hopwell.perf.colors import is_ours
from hopwell.perf.decode_workloads import Decode
from hopwell.perf.family import Case, Family
from hopwell.perf.prefill_workloads import Prefill

# Which kernel serves a request depends neither on its keys nor on how many requests there are, and on its queries as
# long as they are few: so many are not.
KEYS, QUERIES = 4096, 512


def configs_of(family: Family, cases: Sequence[Case], candidates: Sequence[str]) -> dict[str, Buildable]:
    """Return the configs, by name, of the kernels that our candidates launch in these cases; none for what they
    refuse."""
    found: dict[str, Buildable] = {}
    with _recording(found):
        for case in cases:
            inputs = family.inputs(smaller(case), device="cpu")
            for title in filter(is_ours, candidates):
                with contextlib.suppress(NotImplementedError):
                    family.candidates[title](inputs)()
    return found


def smaller(case: Any) -> Any:
    """Return a case that takes the same kernels as ``case`` and less memory, where there is one at hand."""
    if isinstance(case, Decode):
        return replace(case, kv_lens=(min(max(case.kv_lens), KEYS),))
    if isinstance(case, Prefill) and len({*case.q_lens}) == 1:
        return replace(case, q_lens=(min(case.q_lens[0], QUERIES),), kv_lens=(min(case.kv_lens[0], KEYS),))
    if isinstance(case, Prefill):  # uneven requests have a mean of queries, and no more keys than these need
        return replace(case, kv_lens=case.q_lens)
    return case


@contextlib.contextmanager
def _recording(found: dict[str, Buildable]) -> Iterator[None]:
    """Keep the config of each kernel in place of compiling and launching it."""

    def bind(config: Buildable, device: Any) -> Any:
        found[config.name] = config
        return lambda *arguments, **options: None

    with mock.patch.object(plan, "bind", bind), mock.patch.object(append_plan, "bind", bind):
        yield
