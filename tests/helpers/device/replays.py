"""A graph of one call, replayed with other contents of its input tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def check_replays(
    call: Callable[[], torch.Tensor],
    out: torch.Tensor,
    batches: Iterable[T],
    fill: Callable[[T], None],
    check: Callable[[T, torch.Tensor], None],
) -> None:
    """Check that one graph serves all batches, which ``fill`` copies to the call's tensors.

    Each replay passes ``check`` and gives the bits of a separate call.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for data in batches:
        fill(data)
        for _ in range(3):
            out.fill_(7)
            graph.replay()
        replayed = out.clone()
        check(data, replayed)
        assert torch.equal(call(), replayed)
