"""tcgen05 MLA kernels of few rows compile without a GPU, with the registers, tensor memory and products they should
have."""

from __future__ import annotations

import re

import pytest
from helpers.covering.sm100_swap_ab_mla import COVERING_SWAP_AB_MLA

from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.hardware import REGISTERS, WARPGROUP
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.sm100.mla.config import Sm100SwapABMlaConfig
from hopwell.perf.resources import Resources

pytestmark = pytest.mark.compile

# Bytes outside the loops over tiles: code before the roles has the registers of 384 threads, 168.
MOST_STACK = 80
# The warp that loads eight stages of e4m3 keys of 320 columns in boxes of 8 keys has the most addresses (2026-11-27).
SMALL_BOXES_STACK = 192
CONFIGS = pytest.mark.parametrize("config", COVERING_SWAP_AB_MLA, ids=lambda config: config.name)
# Fields of the PTX ISA's "Instruction descriptor": types of A and B, majorness of A and B, N / 8, M / 16.
TYPES, MAJORS, N, M = (7, 7), (15, 3), (17, 63), (24, 31)


def field(descriptor: int, place: tuple[int, int]) -> int:
    shift, mask = place
    return descriptor >> shift & mask


@CONFIGS
def test_loops_over_tiles_do_not_spill(config: Sm100SwapABMlaConfig) -> None:
    built = artifact(config)
    has, ptx = Resources.of(built), built.ptx.read_text()
    assert has.local == 0
    assert has.step_spills == 0
    small = config.uses_fp8_mma and config.head_dim_v == 256 and config.box_rows == 8
    assert has.stack <= (SMALL_BOXES_STACK if small else MOST_STACK)
    assert not re.search(r"\.local\b", ptx), "an array is indexed at run time"
    threads = WARPGROUP * len(config.registers)
    assert has.registers * threads <= REGISTERS
    assert WARPGROUP * sum(config.registers) <= has.registers * threads, "the roles take more than the launch has"


@CONFIGS
def test_tensor_memory(config: Sm100SwapABMlaConfig) -> None:
    """A warp allocates the columns once and frees them. No instruction is of a pair of CTAs."""
    ptx = artifact(config).ptx.read_text()
    columns = {512: "256", 256: "128"}[config.head_dim_v]
    for instruction in ("alloc", "dealloc"):
        assert re.findall(rf"\btcgen05\.{instruction}\b[^;]*, (\d+);", ptx) == [columns], instruction
        assert len(re.findall(rf"\btcgen05\.{instruction}\b", ptx)) == 1
    assert {*re.findall(r"\btcgen05\.[\w.]*?cta_group::(\d)", ptx)} == {"1"}
    assert "wgmma" not in ptx
    assert "mma.sync" not in ptx


@CONFIGS
def test_products(config: Sm100SwapABMlaConfig) -> None:
    """Keys are the 64 rows of an instruction and packed rows its 16 columns. An instruction takes 32 bytes of each row;
    loops over tiles are not unrolled."""
    kind = "f8f6f4" if config.uses_fp8_mma else "f16"
    ptx = artifact(config).ptx.read_text()
    products = re.findall(rf"\btcgen05\.mma\.cta_group::1\.kind::{kind} \[%r\d+\], a, b, (\d+), p;", ptx)
    assert len(products) == ptx.count("tcgen05.mma"), "A and B are in shared memory"
    descriptors = [int(product) for product in products]
    assert {(field(each, M), field(each, N)) for each in descriptors} == {(64 // 16, 16 // 8)}
    assert {field(each, TYPES) for each in descriptors} == {{"bf16": 1, "fp16": 0, "e4m3": 0}[config.dtype]}
    # V has its columns innermost, so A of P V is M-major.
    by_major = {major: sum(field(each, MAJORS) == major for each in descriptors) for major in range(4)}
    depth = 32 if config.uses_fp8_mma else 16
    scores, output = config.head_dim_qk // depth, config.head_dim_v // 64 * (64 // depth)
    assert by_major == {0: scores, 1: output, 2: 0, 3: 0}
    if (config.head_dim_qk, config.uses_fp8_mma) == (576, False):
        assert (scores, output) == (36, 32)


@CONFIGS
def test_copies(config: Sm100SwapABMlaConfig) -> None:
    """TMA fetches boxes of keys. Lanes copy Q and rows of keys; the copies of rows arrive at barriers by themselves."""
    ptx = artifact(config).ptx.read_text()
    by_lanes = config.kv_fetch is not KvFetch.PAGE_BOXES
    assert bool(re.search(r"\bcp\.async\.bulk\.tensor\b", ptx)) == (not by_lanes)
    assert bool(re.search(r"\bcp\.async\.mbarrier\.arrive\b", ptx)) == by_lanes
