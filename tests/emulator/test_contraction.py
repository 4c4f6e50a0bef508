"""Products and sums that the GPU's compiler fuses, and others that it keeps apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.device.ptx import run_ptx

# Their product is 1 + 2^-36, which rounds to 1.
A, B = 1 - 2.0**-12 + 2.0**-24, 1 + 2.0**-12
LOAD = "".join(f"mov.f32 %r4{k}, 0f{int(np.float32(x).view(np.uint32)):08X};" for k, x in enumerate((A, B, 1.0)))
STORE = "st.global.b32 [%a0], %r45;"


def result(text: str) -> float:
    """Return %r45 after PTX with A, B and 1 in %r40, %r41 and %r42."""
    out = torch.zeros(1)
    run_ptx(LOAD + text + STORE, out, race=False)
    return out.item()


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize(
    ("total", "sign"),
    [
        ("add{}.f32 %r45, %r43, 0fBF800000;", 1),
        ("add{}.f32 %r45, 0fBF800000, %r43;", 1),
        ("sub{}.f32 %r45, %r43, %r42;", 1),
        ("sub{}.f32 %r45, %r42, %r43;", -1),
    ],
)
def test_a_product_that_is_used_once_joins_the_sum(total, sign, ftz):
    assert result(f"mul{ftz}.f32 %r43, %r40, %r41; {total.format(ftz)}") == sign * 2.0**-36


@pytest.mark.parametrize(
    "text",
    [
        "mul.rn.f32 %r43, %r40, %r41; sub.f32 %r45, %r43, %r42;",
        "mul.f32 %r43, %r40, %r41; sub.rn.f32 %r45, %r43, %r42;",
        "mul.f32 %r43, %r40, %r41; sub.ftz.f32 %r45, %r43, %r42;",
        "mul.f32 %r43, %r40, %r41; sub.f32 %r45, %r43, %r42; add.f32 %r46, %r43, %r42;",  # used twice
        "mul.f32 %r43, %r40, %r41; bra NEXT; NEXT: sub.f32 %r45, %r43, %r42;",
        "mul.f32 %r43, %r40, %r41; mov.f32 %r40, %r41; sub.f32 %r45, %r43, %r42;",
        "mov.f32 %r43, %r40; mul.f32 %r43, %r43, %r41; sub.f32 %r45, %r43, %r42;",
        "setp.eq.u32 %p1, %lane, %lane; @%p1 mul.f32 %r43, %r40, %r41; sub.f32 %r45, %r43, %r42;",
    ],
)
def test_other_products_round_before_the_sum(text):
    assert result(text) == 0
