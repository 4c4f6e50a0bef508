"""Kernels as text: every config comes back from its text, and wrong texts are refused by their wrong part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopwell.kernels.capability.kernel_texts import config_of, text_of
from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import ScoreKind
from hopwell.kernels.support import ARCHS, PREFILL_TYPES


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_comes_back(arch: str) -> None:
    configs = list(kernels_to_ship(arch, PREFILL_TYPES))
    assert [config_of(text_of(config)) for config in configs] == configs


def test_kernels_on_demand_come_back() -> None:
    plain = next(c for c in kernels_to_ship("sm_90a") if isinstance(c, PrefillConfig))
    capped = replace(plain, score=ScoreKind.SOFT_CAP, uneven_pages=True, compiled_for="sm_100a")
    text = text_of(capped)
    assert config_of(text) == capped
    assert not set(text) & set(" '\"`$;&|<>()*"), "a shell takes it without quotes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Prefill:arch=sm_90a", "the type must be one of AppendConfig, DecodeConfig"),
        ("AppendConfig:arch=sm_90a,type=bf16", "AppendConfig has no field 'type'"),
        ("AppendConfig:arch=sm_90a,dtype=bf16,kind=int4", "kind must be one of wide, e4m3, nvfp4, nvfp4_interleaved"),
        ("AppendConfig:arch=sm_90a,dtype=bf16", "there is no such kernel: .*kind"),
        ("AppendConfig:arch=sm_77,dtype=bf16,kind=e4m3", "arch must be one of sm_90a, .*, got 'sm_77'"),
        ("AppendConfig", "AppendConfig has no field ''"),
        (
            "PrefillConfig:arch=sm_90a,dtype=bf16,out_dtype=bf16,head_dim_qk=x,head_dim_v=64,mask=causal,kv_fetch=rows",
            "head_dim_qk must be an integer, got 'x'",
        ),
        (
            "PrefillConfig:arch=sm_90a,dtype=bf16,out_dtype=bf16,head_dim_qk=7,head_dim_v=7,mask=causal,kv_fetch=rows,"
            "box_rows=0",
            "there is no such kernel",
        ),
    ],
)
def test_wrong_texts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(text)
