"""Pack the mask of several new tokens per request for the decode entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hopwell._checks import arguments as checks
from hopwell._checks import device_data
from hopwell.kernels.launch.device_data import Rule, first_fault, signed

ROW_BITS, WORD_BITS = 32, 16  # rows are padded to 32 bits, and consist of uint16 words


def packed_mask(mask: Any, parents: Any, q_len_per_req: Any) -> torch.Tensor:
    """Check the arguments of ``hopwell.decode.pack_mask`` and return its result."""
    if (mask is None) == (parents is None):
        given = "neither" if mask is None else "both"
        raise ValueError(f"one of mask and parents must be given, got {given}")
    visible = _visible(mask) if parents is None else _tree(parents)
    q_len = visible.shape[-1]
    bound = q_len if q_len_per_req is None else checks.host_int("q_len_per_req", q_len_per_req, minimum=1)
    if bound < q_len:
        raise ValueError(f"q_len_per_req must be at least {q_len}, the new tokens of a row, got {bound}")
    bits = -(-bound // ROW_BITS) * ROW_BITS
    words = torch.nn.functional.pad(visible.contiguous(), (0, bits - q_len)).unflatten(-1, (-1, WORD_BITS))
    return (words.int() << torch.arange(WORD_BITS, device=words.device)).sum(-1).to(torch.uint16)


def _visible(mask: Any) -> torch.Tensor:
    visible = checks.tensor("mask", mask)
    checks.dtype("mask", visible, (torch.bool,))
    rows, q_len = visible.shape[-2:] if visible.dim() > 1 else (0, 0)
    if visible.dim() not in (2, 3) or not q_len or (visible.dim() == 3 and rows != q_len):
        raise ValueError(
            f"mask must have shape [batch, q_len, q_len] or [tokens, q_len] with a q_len of at least 1, "
            f"got {tuple(visible.shape)}"
        )
    return visible


def _tree(parents: Any) -> torch.Tensor:
    """Return which tokens each token sees: itself and its ancestors."""
    is_host = isinstance(parents, (list, tuple))
    given = _host_tensor(parents) if is_host else checks.tensor("parents", parents, "a list or a torch.Tensor")
    checks.dtype("parents", given, checks.INTEGERS)
    if given.dim() not in (1, 2) or not given.shape[-1]:
        raise ValueError(
            f"parents must have shape [batch, q_len] or [q_len] with a q_len of at least 1, got {tuple(given.shape)}"
        )
    index = signed(given)
    tokens = torch.arange(index.shape[-1], device=index.device)
    visible = (tokens == index[..., None]) | (tokens == tokens[:, None])
    for _ in range((len(tokens) - 1).bit_length()):
        visible = visible.float() @ visible.float() > 0  # ancestors at up to twice the distance
    if is_host:
        fault = first_fault(_rules(index, visible))
        if fault is not None:
            raise ValueError(fault.message("parents"))
    elif device_data.is_enabled():
        device_data.check(_rules(index, visible), index.device)
    return visible


def _host_tensor(parents: Any) -> torch.Tensor:
    try:
        return torch.tensor(parents, dtype=None if parents else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"parents as a list must have the same number of ints for each request: {error}") from None


def _rules(parents: torch.Tensor, visible: torch.Tensor) -> Iterator[Rule]:
    """Yield the rules that parents are tokens of the request, and that no token is its own ancestor."""
    q_len = parents.shape[-1]
    own = torch.arange(q_len, device=parents.device)
    text = f"less than {q_len}, the number of new tokens, or negative for a root"
    yield Rule("parents", parents, parents >= q_len, lambda index: text)
    is_cycle = (visible & visible.mT & (own != own[:, None])).any(-1) | (parents == own)
    yield Rule("parents", parents, is_cycle, lambda index: "a token that does not descend from this one")
