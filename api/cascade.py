"""Merge of partial attention results, at the module path and with the signatures of ``flashinfer.cascade``.

A state is the output of attention over some of the keys, and its log-sum-exp (LSE). States over disjoint keys merge to
the state over all of these keys. The functions are plain PyTorch: torch.compile traces them, and gradients flow.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hopwell._checks import arguments as checks

__all__ = ["merge_ranks", "merge_state", "merge_state_in_place", "merge_states"]

# Names of the base in the entries: decode and MLA (return_lse_base), context and cuDNN (lse_base).
BASES = {"base2": False, "log2": False, "basee": True, "ln": True}  # whether it is natural


def merge_states(v: torch.Tensor, s: torch.Tensor, *, lse_base: str = "base2") -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states over disjoint keys, such as chunks of a prompt or the keys of several ranks.

    The merge is computed in float32, or in float64 for a float64 ``v``. A state with an LSE of -inf has no keys, and
    its output does not count, even if it is NaN. If no state has keys, the output is 0 and the LSE -inf. An LSE of +inf
    outweighs all finite ones; NaN gives NaN.

    Attention sinks count once: merge them as one more state with an output of 0 and the sinks as its natural LSE.

    Args:
        v: outputs [..., num_states, num_heads, head_dim] of any floating-point dtype.
        s: their LSE [..., num_states, num_heads], float32.
        lse_base: base of the logarithms: "base2" or "log2", as in FlashInfer; "basee" or "ln" for natural ones. Both
            names of each base occur in hopwell's entries.

    Returns:
        The output [..., num_heads, head_dim] in the dtype of ``v``, and its LSE [..., num_heads] in the same base,
        float32 (float64 for a float64 ``v``).

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, a shape or the base is wrong; the message names the argument.

    >>> outputs, lse = torch.tensor([[[1.0]], [[5.0]]]), torch.tensor([[0.0], [0.0]])
    >>> [merged.item() for merged in merge_states(outputs, lse)]
    [3.0, 1.0]
    """
    checks.choice("lse_base", lse_base, tuple(BASES))
    _check("v", v, "s", s, ("num_states", "num_heads", "head_dim"))
    natural = BASES[lse_base]
    accumulator = torch.float64 if v.dtype == torch.float64 else torch.float32
    s = s.to(accumulator)
    largest = s.amax(-2, keepdim=True)
    is_empty = s == -torch.inf
    relative = torch.where(s == largest, 0.0, s - largest)  # the difference of two infinities would be NaN
    weights = (relative.exp() if natural else relative.exp2()).masked_fill(is_empty, 0.0)
    total = weights.sum(-2)
    shares = weights / torch.where(total == 0, 1.0, total).unsqueeze(-2)
    outputs = v.to(accumulator).masked_fill(is_empty.unsqueeze(-1), 0.0)
    merged = (shares.unsqueeze(-1) * outputs).sum(-3).to(v.dtype)
    return merged, largest.squeeze(-2) + (total.log() if natural else total.log2())


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, *, lse_base: str = "base2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states over disjoint keys, see :func:`merge_states`.

    Args:
        v_a: output of the first state, [..., num_heads, head_dim].
        s_a: its LSE [..., num_heads], float32.
        v_b: output of the second state, in the shape and dtype of ``v_a``.
        s_b: its LSE.
        lse_base: as in :func:`merge_states`.

    Returns:
        The merged output and its LSE.

    Raises:
        TypeError, ValueError: as in :func:`merge_states`.
    """
    _check("v_a", v_a, "s_a", s_a, ("num_heads", "head_dim"))
    _check("v_b", v_b, "s_b", s_b, ("num_heads", "head_dim"))
    if v_a.shape != v_b.shape or v_a.dtype != v_b.dtype:
        raise ValueError(
            f"v_b must have the shape and dtype of v_a, {tuple(v_a.shape)} and {v_a.dtype}, got {tuple(v_b.shape)} and "
            f"{v_b.dtype}"
        )
    return merge_states(torch.stack((v_a, v_b), -3), torch.stack((s_a, s_b), -2), lse_base=lse_base)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    lse_base: str = "base2",
) -> None:
    """Merge a second state into the first, see :func:`merge_states`.

    Args:
        v: output of the first state [tokens, num_heads, head_dim], overwritten by the merged output.
        s: its LSE [tokens, num_heads], float32, overwritten by the merged LSE.
        v_other: output of the second state.
        s_other: its LSE.
        mask: bool [tokens], whether to merge a token; others keep their state. None merges all.
        lse_base: as in :func:`merge_states`.

    Raises:
        TypeError, ValueError: as in :func:`merge_states`.
    """
    merged, lse = merge_state(v, s, v_other, s_other, lse_base=lse_base)
    if mask is not None:
        checks.unread_tensor("mask", mask, "a torch.Tensor or None")
        checks.dtype("mask", mask, (torch.bool,))
        checks.shape("mask", mask, ("tokens", v.shape[0]))
        merged = torch.where(mask[:, None, None], merged, v)
        lse = torch.where(mask[:, None], lse, s)
    v.copy_(merged)
    s.copy_(lse)


def merge_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    lse_base: str = "base2",
    scatter_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the states of all ranks of a group, each over its own keys of the same requests (context parallel).

    Every rank has all query heads and its share of the keys, as in decode context parallel (DCP), and calls this
    function with its results. Requests may have any number of new tokens. A rank without keys of a request takes part
    with its output of 0 and LSE of -inf. Ranks send 16-bit outputs as they are and merge them in float32 in the order
    of the ranks, so all ranks get the same bits.

    Args:
        out: this rank's output [..., num_heads, head_dim], such as [tokens, num_heads, head_dim], or [batch, q_len,
            num_heads, head_dim] of MLA.
        lse: its LSE, float32, with the same rows: [..., num_heads], or [rows, num_heads] for any ``out``.
        group: process group; None means the default group.
        lse_base: base of the LSE, as in :func:`merge_states`.
        scatter_heads: return only this rank's equal part of the heads, as tensor parallel layers after attention need
            it. Each rank then sends (n - 1) / n of ``out`` in all for n ranks (all-to-all). Otherwise it receives
            n - 1 outputs (all-gather).

    Returns:
        The merged output in the shape and dtype of ``out``, and its LSE in the shape of ``lse``; with
        ``scatter_heads`` with num_heads / n heads.

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, a shape or the base is wrong, or n does not divide the heads; the message names the
            argument.
        RuntimeError: torch.distributed is not initialised.
    """
    checks.choice("lse_base", lse_base, tuple(BASES))
    checks.flag("scatter_heads", scatter_heads)
    rows = _rows(out, lse)
    if not dist.is_initialized():
        raise RuntimeError("merge_ranks needs torch.distributed: call torch.distributed.init_process_group first")
    world, heads = dist.get_world_size(group), out.shape[-2]
    if scatter_heads and heads % world:
        raise ValueError(f"out must have a multiple of {world} heads, the ranks of the group, got {heads}")
    states = []
    for tensor in (rows, lse.reshape(rows.shape[:2])):
        if scatter_heads:  # [rows, n, heads / n, ...] to [n, rows, heads / n, ...]
            parts = tensor.unflatten(1, (world, heads // world)).movedim(1, 0)
        else:
            parts = tensor
        states.append(_exchanged(parts.contiguous(), world, group, scatter_heads).movedim(0, 1))
    merged, total = merge_states(states[0], states[1], lse_base=lse_base)
    kept = heads // world if scatter_heads else heads
    return merged.view(*out.shape[:-2], kept, out.shape[-1]), total.view(*lse.shape[:-1], kept)


def _exchanged(part: torch.Tensor, world: int, group: dist.ProcessGroup | None, scatters: bool) -> torch.Tensor:
    """Return [n, ...]: the tensors of all n ranks, or the parts that all ranks have for this rank.

    Data is sent as bytes, because not every back end takes every dtype.
    """
    sent = part.view(torch.uint8)
    if scatters:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
    else:
        received = sent.new_empty(world, *sent.shape)
        dist.all_gather_into_tensor(received.flatten(0, 1), sent, group=group)
    return received.view(part.dtype)


def _rows(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Check a state and return its output as [rows, num_heads, head_dim]."""
    checks.unread_tensor("out", out)
    if out.dim() < 3:
        raise ValueError(f"out must have shape [..., num_heads, head_dim], got {tuple(out.shape)}")
    rows = out.flatten(0, -3)
    checks.unread_tensor("lse", lse)
    if tuple(lse.shape) not in (tuple(out.shape[:-1]), tuple(rows.shape[:-1])):
        raise ValueError(
            f"lse must have shape {tuple(out.shape[:-1])} or {tuple(rows.shape[:-1])} for an out of "
            f"{tuple(out.shape)}, got {tuple(lse.shape)}"
        )
    _check("out", rows, "lse", lse.reshape(rows.shape[:2]), ("num_heads", "head_dim"))
    return rows


def _check(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, sizes: tuple[str, ...]) -> None:
    for name, value in ((v_name, v), (s_name, s)):
        checks.unread_tensor(name, value)
        if not value.is_floating_point():
            raise ValueError(f"{name} must have a floating-point dtype, got {value.dtype}")
    if v.dim() < len(sizes):
        raise ValueError(f"{v_name} must have shape [..., {', '.join(sizes)}], got {tuple(v.shape)}")
    if v.shape[:-1] != s.shape:
        raise ValueError(
            f"{s_name} must have the shape of {v_name} without head_dim, {tuple(v.shape[:-1])}, got {tuple(s.shape)}"
        )
    if s.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{s_name} must be torch.float32, got {s.dtype}")
    if s.device != v.device:
        raise ValueError(f"{s_name} must be on {v.device}, the device of {v_name}, got {s.device}")
    if v.dim() > 2 and sizes[0] == "num_states" and v.shape[-3] < 1:
        raise ValueError(f"{v_name} must have at least one state, got shape {tuple(v.shape)}")
