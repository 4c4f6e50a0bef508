"""Loads, stores and atomics in every state space, and behaviour at the edges of memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import MemoryFault, Span, UninitializedRead, Unsupported
from hopwell.emulator.machine.memory import GlobalMemory


def test_vector_loads_and_stores_keep_order():
    x, y = torch.arange(128, dtype=torch.int32), empty(128)
    run_ptx(
        "mul.wide.u32 %d1, %tid, 16; add.u64 %d2, %a0, %d1; add.u64 %d3, %a1, %d1;\n"
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d2]; st.global.v4.b32 [%d3], {%r4, %r3, %r2, %r1};",
        x, y,
    )  # fmt: skip
    assert torch.equal(y.view(-1, 4), x.view(-1, 4).flip(1))


@pytest.mark.parametrize(("kind", "dtype"), [("s8", torch.int8), ("u8", torch.uint8), ("s16", torch.int16)])
def test_narrow_loads_extend(kind, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    x = torch.arange(-16, 16, dtype=torch.int32).to(dtype)
    y = empty(32)
    run_ptx(
        f"mul.wide.u32 %d1, %tid, {size}; add.u64 %d2, %a0, %d1; ld.global.{kind} %r1, [%d2];\n"
        "mul.wide.u32 %d1, %tid, 4; add.u64 %d2, %a1, %d1; st.global.b32 [%d2], %r1;",
        x, y,
    )  # fmt: skip
    assert torch.equal(y, x.to(torch.int32))


def test_shared_memory_through_generic_addresses():
    y = empty(32)
    run_ptx(
        "mov.u32 %r1, smem; shl.b32 %r2, %tid, 2; add.u32 %r1, %r1, %r2; st.shared.b32 [%r1], %tid;\n"
        "bar.sync 0; xor.b32 %r3, %r2, 124; mov.u32 %r4, smem; add.u32 %r4, %r4, %r3;\n"
        "cvt.u64.u32 %d1, %r4; cvta.shared.u64 %d2, %d1; ld.b32 %r5, [%d2]; isspacep.shared %p1, %d2;\n"
        "selp.b32 %r5, %r5, -1, %p1; mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.b32 [%d4], %r5;",
        y, shared=128,
    )  # fmt: skip
    assert y.tolist() == list(range(31, -1, -1))


def test_local_memory_is_private_to_a_lane():
    y = empty(32)
    run_ptx(
        ".local .align 8 .b8 stack[16];\nmov.u32 %r1, stack; st.local.b32 [%r1+8], %tid; ld.local.b32 %r2, [%r1+8];\n"
        "mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %r2;",
        y,
    )  # fmt: skip
    assert y.tolist() == list(range(32))


ATOMICS = {
    "add.u32": (100 + sum(range(32)), torch.int32),
    "min.s32": (0, torch.int32),
    "max.s32": (100, torch.int32),
    "xor.b32": (100, torch.int32),
    "inc.u32": (None, torch.int32),
}


@pytest.mark.parametrize("op", ["add.u32", "min.s32", "max.s32", "xor.b32"])
def test_atomics_apply_every_lane(op):
    y = torch.full((1,), 100, dtype=torch.int32)
    run_ptx(f"atom.global.{op} %r1, [%a0], %tid;", y)
    assert y.item() == ATOMICS[op][0]


def test_atomics_return_the_old_value_and_compare():
    y, old = empty(1), empty(32)
    run_ptx(
        "atom.global.add.u32 %r1, [%a0], 1; mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a1, %d3;\n"
        "st.global.b32 [%d4], %r1;\n"
        "atom.global.cas.b32 %r2, [%a0], 32, 7;",
        y, old,
    )  # fmt: skip
    assert sorted(old.tolist()) == list(range(32))
    assert y.item() == 7


def test_float_atomics_and_reductions():
    y = torch.zeros(1)
    run_ptx("cvt.rn.f32.u32 %r1, %tid; red.global.add.f32 [%a0], %r1;", y)
    assert y.item() == sum(range(32))
    h = torch.zeros(2, dtype=torch.float16)
    run_ptx("mov.b32 %r1, 0x3C004000; red.global.add.noftz.f16x2 [%a0], %r1;", h)
    assert h.tolist() == [64.0, 32.0]


def test_shared_atomics():
    y = empty(1)
    run_ptx(
        "mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 st.shared.b32 [%r1], 5; bar.sync 0;\n"
        "atom.shared.add.u32 %r2, [%r1], 2; bar.sync 0; ld.shared.b32 %r3, [%r1]; @%p1 st.global.b32 [%a0], %r3;",
        y, shared=16, block=64,
    )  # fmt: skip
    assert y.item() == 5 + 2 * 64


def test_masked_stores_write_only_their_lanes():
    y = torch.full((32,), 9, dtype=torch.int32)
    run_ptx(
        "setp.lt.u32 %p1, %tid, 4; mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; @%p1 st.global.b32 [%d4], %tid;", y
    )
    assert y.tolist() == [0, 1, 2, 3] + [9] * 28


# ------------------------------------------------------------------ faults
def test_out_of_bounds_names_the_tensor_and_the_line():
    y = empty(16)
    with pytest.raises(MemoryFault, match=r"past the end of arg0(.|\n)*warp 0 lane 16(.|\n)*st.global.b32"):
        run_ptx("mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %tid;", y)


def test_access_before_the_start_is_reported():
    y = empty(16)
    with pytest.raises(MemoryFault, match="4 bytes before the start of arg0"):
        run_ptx("ld.global.b32 %r1, [%a0+-4];", y)


def test_misaligned_access():
    y = empty(16)
    with pytest.raises(MemoryFault, match="not a multiple of 8"):
        run_ptx("ld.global.v2.b32 {%r1, %r2}, [%a0+4];", y)


def test_write_to_an_input():
    y = empty(16)
    with pytest.raises(MemoryFault, match="write of 4 bytes to an input tensor: arg0"):
        run_ptx("st.global.b32 [%a0], 1;", y, roles="in")


def test_shared_memory_bounds():
    with pytest.raises(MemoryFault, match="shared-memory access"):
        run_ptx("mov.u32 %r1, smem; st.shared.b32 [%r1+4096], 1;", shared=128)
    with pytest.raises(MemoryFault, match="shared-memory access"):
        run_ptx("mov.u32 %r1, 512; ld.shared.b32 %r2, [%r1];", shared=128)


def test_generic_lanes_must_agree_on_the_space():
    y = empty(16)
    with pytest.raises(Unsupported, match="different state spaces"):
        run_ptx(
            "cvt.u64.u32 %d1, 1024; cvta.shared.u64 %d1, %d1; setp.eq.u32 %p1, %tid, 0; selp.b64 %d2, %d1, %a0, %p1;\n"
            "ld.b32 %r1, [%d2];",
            y, shared=64,
        )  # fmt: skip


def test_overlapping_tensors_are_one_region_with_both_names():
    cache = torch.zeros(8, 2, 16)
    with pytest.raises(MemoryFault, match=r"arg0|arg1"):
        run_ptx("ld.global.b32 %r1, [%a1+4096];", cache[:, 0], cache[:, 1])
    run_ptx("ld.global.b32 %r1, [%a0+64]; ld.global.b32 %r2, [%a1+-64];", cache[:, 0], cache[:, 1])


# ------------------------------------------------------------------ uninitialised memory
def test_strict_mode_finds_reads_of_unwritten_registers():
    y = empty(1)
    with pytest.raises(UninitializedRead, match=r"register %r6 "):
        run_ptx("add.u32 %r5, %r6, 1; st.global.b32 [%a0], %r5;", y, strict=True)
    run_ptx("mov.u32 %r6, 1; add.u32 %r5, %r6, 1; st.global.b32 [%a0], %r5;", y, strict=True)


def test_strict_mode_knows_which_lanes_were_written():
    with pytest.raises(UninitializedRead, match="lane 1"):
        run_ptx("setp.eq.u32 %p1, %tid, 0; @%p1 mov.u32 %r6, 1; add.u32 %r5, %r6, 1;", strict=True)


def test_strict_mode_finds_reads_of_unwritten_shared_memory():
    body = "mov.u32 %r1, smem; st.shared.b32 [%r1+64], 1; ld.shared.b32 %r2, [%r1+{}];"
    run_ptx(body.format(64), shared=128, strict=True)
    with pytest.raises(UninitializedRead, match=r"shared memory(.|\n)*smem\+0x44"):
        run_ptx(body.format(68), shared=128, strict=True)


def test_strict_mode_finds_reads_of_an_output_before_its_first_write():
    y = empty(4)
    with pytest.raises(UninitializedRead, match="arg0"):
        run_ptx("ld.global.b32 %r1, [%a0];", y, roles="out", strict=True)
    run_ptx("st.global.b32 [%a0], 3; ld.global.b32 %r1, [%a0];", y, roles="out", strict=True)


def test_outputs_that_are_not_written_completely_are_listed():
    y = empty(64)
    report = run_ptx("mul.wide.u32 %d3, %tid, 4; add.u64 %d4, %a0, %d3; st.global.b32 [%d4], %tid;", y, roles="out")
    assert report.never_written == [("arg0", 32, 32)]


def test_listing_what_is_not_written_takes_little_memory():
    size = 1 << 22
    memory = GlobalMemory([Span("out", 1 << 40, size, "out", 2)], track=True)
    memory.regions[0].written[:64] = 1
    tracemalloc.start()
    try:
        assert memory.never_written() == [("out", size // 2 - 32, 32)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * size


def test_unwritten_shared_memory_is_nan():
    y = torch.zeros(1)
    run_ptx("mov.u32 %r1, smem; ld.shared.b32 %r2, [%r1]; st.global.b32 [%a0], %r2;", y, shared=128)
    assert np.isnan(y.item())


# ------------------------------------------------------------------ bank conflicts
@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (16, 4), (128, 32), (132, 1), (0, 1)])
def test_bank_conflicts_of_word_accesses(stride, passes):
    report = run_ptx(
        f"mov.u32 %r1, smem; mul.lo.u32 %r2, %tid, {stride}; add.u32 %r1, %r1, %r2; st.shared.b32 [%r1], 1;",
        shared=8192,
    )
    assert [(a.wavefronts, a.ideal) for a in report.shared] == [(passes, 1)]
    assert report.bank_conflicts == passes - 1


def test_bank_conflicts_of_16_byte_accesses_go_by_quarter_warps():
    body = (
        "mov.u32 %r1, smem; mul.lo.u32 %r2, %tid, {}; add.u32 %r1, %r1, %r2;\n"
        "ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r1];"
    )
    assert run_ptx(body.format(16), shared=8192).bank_conflicts == 0
    assert run_ptx(body.format(128), shared=8192).bank_conflicts == 4 * 7
