"""Tensor copies and bulk copies: boxes, edges, swizzles, gathers, multicast, pairs, un-elected issue."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.device.copies import CLUSTER, DUMP, MEET, SETUP, WAIT
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Deadlock, MemoryFault, Unsupported
from hopwell.emulator.engines import tensor_map

# CUtensorMapDataType
I32, F32, BF16, PADDED4 = 3, 7, 9, 14


def descriptor(
    kind: int, tensor: torch.Tensor, shape, strides, box, swizzle: int = 0, steps=None, **more
) -> torch.Tensor:
    """Make a tensor map in memory, encoded as the driver would."""
    raw = tensor_map.encode(kind, tensor.data_ptr(), shape, strides, box, steps or [1] * len(shape), swizzle, **more)
    storage = torch.zeros(256, dtype=torch.uint8)
    start = -storage.data_ptr() % 64
    storage[start : start + 128] = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return storage[start : start + 128]


LOAD = (
    "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%a0, {{{at}}}], [%r2];"
)


def matrix(rows: int, cols: int, dtype=torch.int32) -> torch.Tensor:
    return torch.arange(rows * cols, dtype=torch.int32).view(rows, cols).to(dtype)


def run_load(source: torch.Tensor, tmap: torch.Tensor, at, nbytes, announced=None, **settings) -> np.ndarray:
    """Return the bytes of shared memory after one load by lane 0."""
    out = torch.full((nbytes,), 0xAA, dtype=torch.uint8)
    announced = nbytes if announced is None else announced
    coords = ", ".join(str(c) for c in at)
    body = (
        SETUP.format(bar=16384)
        + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {announced};\n@%p1 "
        + LOAD.format(n=len(at), at=coords) + WAIT + DUMP.format(bytes=nbytes)
    )  # fmt: skip
    run_ptx(body, tmap, out, source, shared=16384 + 16, roles="in out in", **{"race": True, "proxy": True, **settings})
    return out.numpy()


def test_a_box_inside_the_tensor():
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 4])
    got = run_load(x, tmap, (8, 4), 8 * 4 * 4).view(np.int32).reshape(4, 8)
    np.testing.assert_array_equal(got, x[4:8, 8:16].numpy())


@pytest.mark.parametrize("at", [(28, 14), (-4, -2), (40, 0), (0, -8), (-3, 15)])
def test_what_lies_outside_of_the_tensor_is_zero(at):
    x = matrix(16, 32) + 1
    tmap = descriptor(I32, x, [32, 16], [128], [8, 4])
    got = run_load(x, tmap, at, 128).view(np.int32).reshape(4, 8)
    wanted = np.zeros((4, 8), np.int32)
    for r in range(4):
        for c in range(8):
            if 0 <= at[1] + r < 16 and 0 <= at[0] + c < 32:
                wanted[r, c] = x[at[1] + r, at[0] + c]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("at", [(24, 14), (-4, -2), (40, 0), (0, -8), (-3, 15)])
@pytest.mark.parametrize(("kind", "dtype"), [(F32, torch.float32), (BF16, torch.bfloat16)])
def test_what_lies_outside_of_the_tensor_is_nan_on_demand(kind, dtype, at):
    """Every half word is 0x7ff7, as on an H200."""
    x = matrix(16, 32, dtype)
    size = x.element_size()
    tmap = descriptor(kind, x, [32, 16], [32 * size], [16, 4], nan_fill=True)
    half_words = run_load(x, tmap, at, 16 * 4 * size).view(np.uint16).reshape(4, 16, size // 2)
    whole = x.view(torch.int16).numpy().view(np.uint16).reshape(16, 32, size // 2)
    for r in range(4):
        for c in range(16):
            row, column = at[1] + r, at[0] + c
            inside = 0 <= row < 16 and 0 <= column < 32
            np.testing.assert_array_equal(half_words[r, c], whole[row, column] if inside else 0x7FF7)


def test_integers_have_no_nan_to_fill_with():
    with pytest.raises(Unsupported, match="integers with NaN fill"):
        descriptor(I32, matrix(16, 32), [32, 16], [128], [8, 4], nan_fill=True)


def test_rank_5_and_traversal_strides():
    x = torch.arange(2 * 3 * 4 * 6 * 8, dtype=torch.int32).view(2, 3, 4, 6, 8)
    tmap = descriptor(I32, x, [8, 6, 4, 3, 2], [32, 192, 768, 2304], [4, 2, 2, 1, 2])
    got = run_load(x, tmap, (4, 1, 2, 1, 0), 4 * 2 * 2 * 2 * 4).view(np.int32)
    np.testing.assert_array_equal(got, x[0:2, 1:2, 2:4, 1:3, 4:8].reshape(-1).numpy())
    tmap = descriptor(I32, x.view(-1, 8), [8, 144], [32], [8, 4], steps=[1, 2])
    got = run_load(x, tmap, (0, 3), 2 * 8 * 4).view(np.int32)
    np.testing.assert_array_equal(got, x.view(-1, 8)[[3, 5]].reshape(-1).numpy())


@pytest.mark.parametrize(("code", "width"), [(1, 32), (2, 64), (3, 128)])
def test_swizzle_exchanges_16_byte_chunks(code, width):
    """CUTLASS Swizzle<B, 4, 3>: chunk index XOR the index of its 128-byte line, within the swizzle's width."""
    rows = 16
    x = matrix(rows, width // 4)
    tmap = descriptor(I32, x, [width // 4, rows], [width], [width // 4, rows], code)
    got = run_load(x, tmap, (0, 0), rows * width).reshape(-1, 16)
    plain = x.numpy().reshape(-1, 4).view(np.uint8).reshape(-1, 16)
    for chunk in range(len(plain)):
        moved = chunk ^ ((chunk >> 3) & (width // 16 - 1))
        np.testing.assert_array_equal(got[moved], plain[chunk])


def test_padded_4_bit_elements_fill_half_of_each_chunk():
    """16U4_ALIGN16B: sixteen elements in eight bytes; the mbarrier counts the packed bytes."""
    x = torch.randint(0, 256, (4, 64), dtype=torch.uint8)  # 128 elements a row
    tmap = descriptor(PADDED4, x, [128, 4], [64], [128, 2])
    got = run_load(x, tmap, (0, 1), 2 * 128, announced=2 * 64).reshape(2, 8, 16)
    np.testing.assert_array_equal(got[:, :, :8], x[1:3].view(2, 8, 8).numpy())


def test_every_lane_issues_its_own_box():
    """PTX elects no lane: eight lanes copy eight boxes, and the barrier counts the bytes of all."""
    x = matrix(64, 8)
    tmap = descriptor(I32, x, [8, 64], [32], [8, 4])
    out = empty(8 * 4 * 8)
    body = (
        SETUP.format(bar=4096)
        + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 1024; bar.warp.sync -1;\n"
        "setp.lt.u32 %p4, %tid, 8; shl.b32 %r6, %tid, 7; add.u32 %r6, %r1, %r6; mul.lo.u32 %r7, %tid, 8;\n"
        "@%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r6], [%a0, {0, %r7}], [%r2];\n"
        + WAIT + DUMP.format(bytes=1024)
    )  # fmt: skip
    run_ptx(body, tmap, out, x, shared=4096 + 16, roles="in out in", race=True, proxy=True)
    wanted = torch.cat([x[8 * k : 8 * k + 4] for k in range(8)])
    assert torch.equal(out.view(32, 8), wanted)


GATHER = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes{form} "
    "[%r1], [%a0, {{{column}, {rows}}}], [{bar}]{mask};"
)
ROWS = [(3, 0, 12, 3), (-1, 5, 16, 15)]  # rows of the tensor in any order; rows outside of it are zero


def gathered(x: torch.Tensor, rows, column: int, width: int) -> np.ndarray:
    inside = [x[r, column : column + width].numpy() if 0 <= r < len(x) else np.zeros(width, np.int32) for r in rows]
    return np.stack(inside)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_gather_of_four_rows(rows, schedule):
    """PTX ISA, "tiled mode: tile::gather4": coordinates are a column and four rows; the box has one row."""
    x = matrix(16, 32) + 1
    tmap = descriptor(I32, x, [32, 16], [128], [8, 1])
    out = empty(32)
    text = GATHER.format(form="", column=16, rows=", ".join(map(str, rows)), bar="%r2", mask="")
    body = (
        SETUP.format(bar=1024) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;\n@%p1 " + text + WAIT
        + DUMP.format(bytes=128)
    )  # fmt: skip
    run_ptx(body, tmap, out, x, shared=1024 + 16, roles="in out in", race=True, proxy=True, schedule=schedule)
    np.testing.assert_array_equal(out.numpy().reshape(4, 8), gathered(x, rows, 16, 8))


def test_gathered_rows_are_swizzled():
    x = matrix(64, 32)
    tmap = descriptor(I32, x, [32, 64], [128], [32, 1], 3)
    out = empty(128)
    text = GATHER.format(form="", column=0, rows="50, 7, 8, 9", bar="%r2", mask="")
    body = (
        SETUP.format(bar=1024) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;\n@%p1 " + text + WAIT
        + DUMP.format(bytes=512)
    )  # fmt: skip
    run_ptx(body, tmap, out, x, shared=1024 + 16, roles="in out in", race=True, proxy=True)
    chunks = out.numpy().reshape(4, 8, 4)
    for r, row in enumerate([50, 7, 8, 9]):
        for c in range(8):
            np.testing.assert_array_equal(chunks[r, c ^ r], x[row, 4 * c : 4 * c + 4].numpy())


def test_multicast_of_a_gather():
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 1])
    out = empty(2 * 32)
    text = GATHER.format(form=".multicast::cluster", column=8, rows="9, 1, 4, 4", bar="%r2", mask=", %h1")
    body = CLUSTER.format(size=128, announced=128) + "setp.eq.and.u32 %p4, %r8, 1, %p1; mov.b16 %h1, 3;\n@%p4 " + text
    run_ptx(body + WAIT + DUMP.format(bytes=128) + MEET, tmap, out, x, shared=1024 + 16, grid=2, cluster=2,
            roles="in out in", race=True, proxy=True)  # fmt: skip
    np.testing.assert_array_equal(out.numpy().reshape(2, 4, 8), [gathered(x, (9, 1, 4, 4), 8, 8)] * 2)


# Each CTA of a pair fills its own shared memory and signals the barrier of the even CTA, which counts both.
LEADER = """
    and.b32 %r9, %r2, 0xFEFFFFFF; shl.b32 %r10, %r8, 1; setp.eq.u32 %p5, %r8, 0; @!%p5 bra MET;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra W; MET:
"""


@pytest.mark.parametrize("kind", ["tile", "gather"])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_both_ctas_of_a_pair_load_for_the_barrier_of_one(kind, schedule):
    """PTX ISA, "cp.async.bulk.tensor": with .cta_group::2 the mbarrier may be in the peer CTA of the destination."""
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 4 if kind == "tile" else 1])
    out = empty(2 * 32)
    form = ".cta_group::2"
    if kind == "tile":
        copy = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
            " [%r1], [%a0, {8, %r10}], [%r9];"
        )
        wanted = [gathered(x, range(2 * rank, 2 * rank + 4), 8, 8) for rank in range(2)]
    else:
        copy = GATHER.format(form=form, column=8, rows="%r10, 5, 4, %r8", bar="%r9", mask="")
        wanted = [gathered(x, (2 * rank, 5, 4, rank), 8, 8) for rank in range(2)]
    # Only the leader announces: the bytes of both CTAs.
    body = CLUSTER.format(size=128, announced=256).replace("@%p1 mbarrier.arrive", "mov.u32 %r8, %cluster_ctarank;"
        " setp.eq.and.u32 %p6, %r8, 0, %p1; @%p6 mbarrier.arrive")  # fmt: skip
    first, second = LEADER.strip().split("@!%p5")
    body += first + "@%p1 " + copy + "\n@!%p5" + second + MEET + DUMP.format(bytes=128) + MEET
    run_ptx(body, tmap, out, x, shared=1024 + 16, grid=2, cluster=2, roles="in out in", target="sm_100a", race=True,
            proxy=True, schedule=schedule)  # fmt: skip
    np.testing.assert_array_equal(out.numpy().reshape(2, 4, 8), wanted)


def test_multicast_in_a_pair_signals_the_even_cta():
    """Both CTAs receive the rows; the barrier of the even CTA counts the bytes of both."""
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 1])
    out = empty(2 * 32)
    form = ".multicast::cluster.cta_group::2"
    copy = GATHER.format(form=form, column=8, rows="6, 5, 4, 3", bar="%r9", mask=", %h1")
    body = CLUSTER.format(size=128, announced=256).replace("@%p1 mbarrier.arrive", "mov.u32 %r8, %cluster_ctarank;"
        " setp.eq.and.u32 %p6, %r8, 0, %p1; @%p6 mbarrier.arrive")  # fmt: skip
    first, second = LEADER.strip().split("@!%p5")
    body += first + "mov.b16 %h1, 3; @%p6 " + copy + "\n@!%p5" + second + MEET + DUMP.format(bytes=128) + MEET
    run_ptx(body, tmap, out, x, shared=1024 + 16, grid=2, cluster=2, roles="in out in", target="sm_100a", race=True,
            proxy=True)  # fmt: skip
    np.testing.assert_array_equal(out.numpy().reshape(2, 4, 8), [gathered(x, (6, 5, 4, 3), 8, 8)] * 2)


def test_multicast_writes_every_cta_and_signals_each_barrier():
    x = matrix(4, 32)
    tmap = descriptor(I32, x, [32, 4], [128], [32, 2])
    out = empty(2 * 64)
    body = (
        SETUP.format(bar=1024)
        + "mov.u32 %r8, %cluster_ctarank; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;\n"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
        "setp.eq.and.u32 %p4, %r8, 1, %p1; mov.b16 %h1, 3;\n"
        "@%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r1], [%a0, {0, 1}], [%r2], %h1;\n"
        + WAIT + "mul.wide.u32 %d5, %r8, 256; add.u64 %a1, %a1, %d5;" + DUMP.format(bytes=256)
        + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    )  # fmt: skip
    run_ptx(body, tmap, out, x, shared=1024 + 16, grid=2, cluster=2, roles="in out in", race=True, proxy=True)
    assert torch.equal(out.view(2, 2, 32), x[1:3].expand(2, 2, 32))


STORE = """
    mov.u32 %r1, smem; shl.b32 %r3, %tid, 4; add.u32 %r4, %r1, %r3; add.u32 %r5, %tid, 100;
    st.shared.v4.b32 [%r4], {%r5, %r5, %r5, %r5}; fence.proxy.async.shared::cta; bar.sync 0;
    setp.eq.u32 %p1, %tid, 0;
"""
STORE_END = "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"


def test_tensor_store_clips_at_the_edge():
    x = torch.zeros(8, 8, dtype=torch.int32)
    tmap = descriptor(I32, x, [8, 8], [32], [4, 32])
    body = STORE + "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%a0, {4, 5}], [%r1];" + STORE_END
    run_ptx(body, tmap, x, shared=512, roles="in inout", race=True, proxy=True)
    wanted = torch.zeros(8, 8, dtype=torch.int32)
    for r in range(3):
        wanted[5 + r, 4:] = 100 + r
    assert torch.equal(x, wanted)


def test_tensor_reduction_adds():
    x = torch.full((32, 4), 7, dtype=torch.int32)
    tmap = descriptor(I32, x, [4, 32], [16], [4, 32])
    body = (
        STORE
        + "@%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%a0, {0, 0}], [%r1];"
        + STORE_END
    )
    run_ptx(body, tmap, x, shared=512, roles="in inout")
    assert torch.equal(x, torch.arange(107, 139, dtype=torch.int32).view(32, 1).expand(32, 4))


def test_bulk_copies_both_ways():
    x, y = torch.arange(64, dtype=torch.int32), empty(64)
    body = (
        SETUP.format(bar=1024)
        + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;\n"
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a0], 256, [%r2];\n" + WAIT
        + "fence.proxy.async.shared::cta; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r1], 256;"
        + STORE_END
    )  # fmt: skip
    run_ptx(body, x, y, shared=1024 + 16, roles="in out", race=True, proxy=True)
    assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["cp.async.ca.shared.global", "cp.async.cg.shared.global"])
def test_cp_async_groups(kind):
    x, y = torch.arange(128, dtype=torch.int32), empty(128)
    body = (
        "mov.u32 %r1, smem; shl.b32 %r3, %tid, 4; add.u32 %r4, %r1, %r3; cvt.u64.u32 %d1, %r3; add.u64 %d2, %a0, %d1;\n"
        f"{kind} [%r4], [%d2], 16; cp.async.commit_group; cp.async.wait_group 0;\n"
        "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4]; add.u64 %d3, %a1, %d1;\n"
        "st.global.v4.b32 [%d3], {%r5, %r6, %r7, %r8};"
    )
    for schedule in ("eager", "late"):
        y.zero_()
        run_ptx(body, x, y, shared=512, schedule=schedule, race=schedule == "eager")
        assert torch.equal(x, y)


def test_cp_async_with_zero_fill():
    x, y = torch.arange(128, dtype=torch.int32) + 1, empty(128)
    body = (
        "mov.u32 %r1, smem; shl.b32 %r3, %tid, 4; add.u32 %r4, %r1, %r3; cvt.u64.u32 %d1, %r3; add.u64 %d2, %a0, %d1;\n"
        "and.b32 %r9, %tid, 3; shl.b32 %r9, %r9, 2; cp.async.cg.shared.global [%r4], [%d2], 16, %r9;\n"
        "cp.async.wait_all;\n"
        "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4]; add.u64 %d3, %a1, %d1;\n"
        "st.global.v4.b32 [%d3], {%r5, %r6, %r7, %r8};"
    )
    run_ptx(body, x, y, shared=512)
    keep = torch.arange(4).expand(32, 4) < (torch.arange(32) % 4).view(32, 1)
    assert torch.equal(y.view(32, 4), torch.where(keep, x.view(32, 4), 0))


@pytest.mark.parametrize("negation", ["", "!"])
def test_cp_async_that_ignores_its_source(negation):
    """With a true predicate, cp.async ignores the source and writes zeros."""
    x, y = torch.arange(128, dtype=torch.int32) + 1, empty(128)
    body = (
        "mov.u32 %r1, smem; shl.b32 %r3, %tid, 4; add.u32 %r4, %r1, %r3; cvt.u64.u32 %d1, %r3; add.u64 %d2, %a0, %d1;\n"
        f"setp.lt.u32 %p3, %tid, 9; cp.async.cg.shared.global [%r4], [%d2], 16, {negation}%p3; cp.async.wait_all;\n"
        "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4]; add.u64 %d3, %a1, %d1;\n"
        "st.global.v4.b32 [%d3], {%r5, %r6, %r7, %r8};"
    )
    run_ptx(body, x, y, shared=512)
    ignored = (torch.arange(32) < 9) != bool(negation)
    assert torch.equal(y.view(32, 4), torch.where(ignored.view(32, 1), 0, x.view(32, 4)))


@pytest.mark.parametrize("operands", ["[%r1+8], [%a0]", "[%r1], [%a0+8]"], ids=["target", "source"])
def test_misaligned_cp_async(operands):
    x = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(MemoryFault, match="is not a multiple of 16"):
        run_ptx(f"mov.u32 %r1, smem; cp.async.cg.shared.global {operands}, 16;", x, shared=512)


def test_cp_async_beyond_shared_memory():
    x = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(MemoryFault, match="shared-memory access"):
        run_ptx("mov.u32 %r1, smem; cp.async.cg.shared.global [%r1+512], [%a0], 16;", x, shared=512)


def test_cp_async_arrives_on_an_mbarrier():
    x, y = torch.arange(128, dtype=torch.int32), empty(128)
    body = (
        "mov.u32 %r1, smem; add.u32 %r2, %r1, 512; setp.eq.u32 %p1, %tid, 0;\n"
        "@%p1 mbarrier.init.shared.b64 [%r2], 32; bar.sync 0;\n"
        "shl.b32 %r3, %tid, 4; add.u32 %r4, %r1, %r3; cvt.u64.u32 %d1, %r3; add.u64 %d2, %a0, %d1;\n"
        "cp.async.cg.shared.global [%r4], [%d2], 16; cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];\n" + WAIT
        + "xor.b32 %r4, %r4, 16; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4]; add.u64 %d3, %a1, %d1;\n"
        "st.global.v4.b32 [%d3], {%r5, %r6, %r7, %r8};"
    )  # fmt: skip
    for schedule in ("eager", "late"):
        run_ptx(body, x, y, shared=512 + 16, schedule=schedule, race=True)
        assert torch.equal(y.view(-1, 2, 4), x.view(-1, 2, 4).flip(1))


# ------------------------------------------------------------------ misuse
def test_a_wrong_byte_count_never_completes():
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 4])
    with pytest.raises(Deadlock, match="-64 transaction bytes outstanding"):
        run_load(x, tmap, (0, 0), 128, announced=64)


def test_descriptor_over_unregistered_memory():
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 32], [128], [8, 4])  # twice the rows that exist
    with pytest.raises(MemoryFault, match="outside of every tensor"):
        run_load(x, tmap, (0, 20), 128)


@pytest.mark.parametrize("place", ["global memory", "parameter"])
@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_dimensions_other_than_the_descriptors(place, schedule, load):
    """The instruction's number of dimensions must equal the descriptor's."""
    x = matrix(16, 8)
    tmap = descriptor(I32, x, [8, 16], [32], [8, 4])
    given = tmap.numpy().tobytes() if place == "parameter" else tmap
    store = "@%p1 cp.async.bulk.tensor.{n}d.global.shared::cta.bulk_group [%a0, {{{at}}}], [%r1];" + STORE_END
    for at in ("0", "0, 0", "0, 0, 0"):
        n = len(at.split(","))
        body = SETUP.format(bar=4096)
        if load:
            body += "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;\n@%p1 " + LOAD.format(n=n, at=at) + WAIT
        else:
            body += store.format(n=n, at=at)
        if n == 2:
            run_ptx(body, given, x, shared=4096 + 16, schedule=schedule)
            continue
        with pytest.raises(MemoryFault, match=rf"copy of {n} dimensions through a tensor map of 2\n.*PTX line \d+"):
            run_ptx(body, given, x, shared=4096 + 16, schedule=schedule)


def test_misaligned_destination():
    x = matrix(16, 32)
    tmap = descriptor(I32, x, [32, 16], [128], [8, 4])
    body = SETUP.format(bar=4096) + "add.u32 %r1, %r1, 16; @%p1 " + LOAD.format(n=2, at="0, 0")
    with pytest.raises(MemoryFault, match="not a multiple of 128"):
        run_ptx(body, tmap, empty(1), x, shared=4096 + 16)


def test_bulk_sizes_are_multiples_of_16():
    x = empty(64)
    body = SETUP.format(bar=1024) + (
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a0], 20, [%r2];"
    )
    with pytest.raises(MemoryFault, match="not multiples of 16"):
        run_ptx(body, x, shared=1024 + 16)


def test_a_descriptor_that_is_none():
    junk = torch.zeros(256, dtype=torch.uint8)
    body = SETUP.format(bar=4096) + "@%p1 " + LOAD.format(n=2, at="0, 0")
    with pytest.raises(Unsupported, match="not a tiled tensor map"):
        run_ptx(body, junk, shared=4096 + 16)


def test_encoding_and_decoding_agree():
    x = torch.zeros(64, dtype=torch.uint8)
    raw = tensor_map.encode(BF16, x.data_ptr(), [64, 100, 7], [2**20, 2**36], [64, 8, 1], [1, 1, 1], 3)
    t = tensor_map.decode(raw)
    assert (t.address, t.rank, t.dims, t.strides, t.box) == (x.data_ptr(), 3, (64, 100, 7), (2**20, 2**36), (64, 8, 1))
    assert (t.dtype, t.swizzle) == (10, 3)
