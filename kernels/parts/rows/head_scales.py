"""Scales of K and V of which each KV head of a cache has its own. A role loads them once for each work tile."""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, const_expr

from hopwell.kernels.parts.core.device import (
    checked_scale,
    device_struct,
    load_float,
    load_output_scale,
    load_scale,
)
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax


@device_struct
class HeadScales:
    """Output scales of which each KV head has one, or whose softmax scales do."""

    value: Float32  # of all heads
    in_softmax: bool  # whether each head has a softmax scale
    in_output: bool  # whether each head has an output scale

    @cute.jit
    def of(self, addresses, head):
        """Return the output scale of a KV head, see :func:`checked_scale`."""
        scale = load_float(addresses.output_scale, head if const_expr(self.in_output) else 0, 1.0) * self.value
        in_softmax = load_float(addresses.softmax_scale, head if const_expr(self.in_softmax) else 0, 0.0)
        return checked_scale(scale, in_softmax)


def softmax_scale(config, addresses, value):
    """Return the softmax scale of all heads; ``value`` alone if each KV head has its own."""
    return value if config.k_head_scales else load_scale(addresses.softmax_scale, value)


def softmax_scale_of(addresses, head):
    """Return the softmax scale of a KV head."""
    return load_float(addresses.softmax_scale, head, 1.0)


def with_scale_of(score: ScoreMap, softmax: OnlineSoftmax, addresses, head) -> tuple[ScoreMap, OnlineSoftmax]:
    """Return score and softmax, with their state, under the softmax scale of a KV head."""
    score = replace(score, scale=softmax_scale_of(addresses, head))
    return score, softmax.with_scale(score.softmax_scale)


def output_scale(config, addresses, value) -> Any:
    """Return the output scale of all heads, or HeadScales if KV heads have scales of their own."""
    if config.k_head_scales or config.v_head_scales:
        return HeadScales(value, config.k_head_scales, config.v_head_scales)
    return load_output_scale(addresses, value)


def output_scale_of(scale, addresses, tile):
    """Return the output scale of a work tile. ``scale`` is the scale of all heads, or HeadScales."""
    return scale.of(addresses, tile.kv_head) if isinstance(scale, HeadScales) else scale
