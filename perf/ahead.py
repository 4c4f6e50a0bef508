"""Finds the kernels that a sweep will launch, without a GPU: calls run on the CPU and stop before the launch."""

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

# Kernel selection does not depend on the number of keys or requests. It depends on the number of queries only while
# there are few, so larger cases are cut to these sizes.
KEYS, QUERIES = 4096, 512


def configs_of(family: Family, cases: Sequence[Case], candidates: Sequence[str]) -> dict[str, Buildable]:
    """Return the configs, by name, of the kernels that our candidates launch in these cases.

    A refused case adds no config.
    """
    found: dict[str, Buildable] = {}
    with _recording(found):
        for case in cases:
            inputs = family.inputs(smaller(case), device="cpu")
            for title in filter(is_ours, candidates):
                with contextlib.suppress(NotImplementedError):
                    family.candidates[title](inputs)()
    return found


def smaller(case: Any) -> Any:
    """Return a case that selects the same kernels as ``case`` with less memory, or ``case`` itself."""
    if isinstance(case, Decode):
        return replace(case, kv_lens=(min(max(case.kv_lens), KEYS),))
    if isinstance(case, Prefill) and len({*case.q_lens}) == 1:
        return replace(case, q_lens=(min(case.q_lens[0], QUERIES),), kv_lens=(min(case.kv_lens[0], KEYS),))
    if isinstance(case, Prefill):  # selection uses the mean of uneven queries, so only keys shrink
        return replace(case, kv_lens=case.q_lens)
    return case


@contextlib.contextmanager
def _recording(found: dict[str, Buildable]) -> Iterator[None]:
    """Record the config of each kernel instead of compiling and launching it."""

    def bind(config: Buildable, device: Any) -> Any:
        found[config.name] = config
        return lambda *arguments, **options: None

    with mock.patch.object(plan, "bind", bind), mock.patch.object(append_plan, "bind", bind):
        yield
