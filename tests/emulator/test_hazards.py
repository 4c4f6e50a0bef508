"""Reports of the race detector and the proxy check, and correct code without a report."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Hazard

MINE = "mov.u32 %r1, smem; shl.b32 %r2, %tid, 2; add.u32 %r3, %r1, %r2; st.shared.b32 [%r3], %tid;\n"
NEIGHBOUR = "xor.b32 %r4, %r2, 128; add.u32 %r4, %r1, %r4; ld.shared.b32 %r5, [%r4];\n"  # of the other warp
BARRIER = "setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r1+512], {count}; bar.sync 0;\n"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+512], 0; @!%p2 bra W;\n"


@pytest.mark.parametrize("schedule", ["eager", "late", "random", "priority"])
def test_a_read_without_a_barrier_is_a_race_in_every_schedule(schedule):
    run_ptx(MINE + "bar.sync 0;\n" + NEIGHBOUR, block=64, shared=256, race=True, schedule=schedule)
    with pytest.raises(Hazard, match=r"race: (read|write) is not ordered after (read|write)") as caught:
        run_ptx(MINE + NEIGHBOUR, block=64, shared=256, race=True, schedule=schedule)
    text = str(caught.value)
    assert "smem+0x" in text
    assert "PTX line" in text
    assert f"schedule='{schedule}'" in text


def test_a_write_after_an_unordered_read():
    body = MINE + "bar.sync 0;\n" + NEIGHBOUR
    run_ptx(body + "bar.sync 0; st.shared.b32 [%r3], 0;", block=64, shared=256, race=True)
    with pytest.raises(Hazard, match="write is not ordered after read"):
        run_ptx(body + "st.shared.b32 [%r3], 0;", block=64, shared=256, race=True)


def test_hazards_can_be_reported_without_an_exception():
    report = run_ptx(MINE + NEIGHBOUR, block=64, shared=256, race=True, hazards="report")
    assert len(report.hazards) >= 1
    assert all(text.startswith("race: ") for text in report.hazards)
    assert not run_ptx(MINE + NEIGHBOUR, block=64, shared=256, hazards="report").hazards


def test_an_mbarrier_orders_what_precedes_the_arrivals():
    body = "mov.u32 %r1, smem; " + BARRIER.format(count=32)
    producer = "setp.eq.u32 %p3, %warp, 0; @!%p3 bra CONSUME;\n" + MINE
    consumer = (
        "bra DONE; CONSUME: shl.b32 %r2, %lane, 2; add.u32 %r3, %r1, %r2;\n{wait} ld.shared.b32 %r5, [%r3]; DONE:"
    )
    arrive = "mbarrier.arrive.shared.b64 _, [%r1+512];\n"
    settings = {"block": 64, "shared": 520, "race": True}
    run_ptx(body + producer + arrive + consumer.format(wait=WAIT), **settings)
    with pytest.raises(Hazard, match="not ordered"):
        run_ptx(body + producer + arrive + consumer.format(wait=""), **settings)
    late = producer.replace(MINE, arrive) + MINE
    with pytest.raises(Hazard, match="not ordered"):
        run_ptx(body + late + consumer.format(wait=WAIT), **settings)


@pytest.mark.parametrize(
    ("late", "is_covered"), [("", True), ("ld.global.b32 %r6, [%a0];", True), (MINE, False)], ids=["", "load", "write"]
)
def test_lanes_that_arrive_in_parts_cover_what_all_of_them_have_done_before(late, is_covered):
    """A diverged warp arrives with some lanes after others, and each lane releases its own writes."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r1+512];"
    body = (
        f"mov.u32 %r1, smem; {BARRIER.format(count=32)} setp.eq.u32 %p3, %warp, 0; @!%p3 bra CONSUME;\n{MINE}"
        f"setp.eq.u32 %p4, %lane, 0; @!%p4 {arrive} {late} @%p4 {arrive} bra DONE;\n"
        f"CONSUME: shl.b32 %r2, %lane, 2; add.u32 %r3, %r1, %r2;\n{WAIT} ld.shared.b32 %r5, [%r3]; DONE:"
    )
    unordered = pytest.raises(Hazard, match="read is not ordered after write")
    with contextlib.nullcontext() if is_covered else unordered:
        run_ptx(body, empty(1), block=64, shared=520, race=True)


PUBLISH = """
    mov.u32 %r1, smem; {barrier}
    setp.eq.u32 %p3, %warp, 0; @!%p3 bra CONSUME;
    ld.global.b32 %r5, [%a0]; {before}
    elect.sync _|%p4, -1;
    @%p4 st.shared.b32 [%r1], %r5;
    @%p4 mbarrier.arrive.shared.b64 _, [%r1+512]; bra DONE;
    CONSUME: {wait} ld.shared.b32 %r6, [%r1]; ld.shared.b32 %r7, [%r1+64]; DONE:
"""


def publish(before: str) -> None:
    """One lane publishes after all lanes have read something."""
    body = PUBLISH.format(barrier=BARRIER.format(count=1), before=before, wait=WAIT)
    run_ptx(body, empty(1), block=64, shared=520, race=True)


def test_a_lane_publishes_its_own_writes():
    publish("")


def test_a_lane_publishes_the_writes_of_others_only_behind_a_warp_barrier():
    """PTX orders the memory accesses of a warp's lanes at bar.warp.sync and nowhere else."""
    store = "setp.eq.u32 %p5, %lane, 7; @%p5 st.shared.b32 [%r1+64], %r5;"
    publish(store + " bar.warp.sync -1;")
    with pytest.raises(Hazard, match="read is not ordered after write") as caught:
        publish(store)
    assert "one lane of warp 0" in str(caught.value)
    with pytest.raises(Hazard, match="read is not ordered after write"):
        publish("shl.b32 %r8, %lane, 2; add.u32 %r8, %r1, %r8; st.shared.b32 [%r8], %r5;")


def test_asynchronous_reads_of_generic_writes_need_a_proxy_fence():
    y = empty(32)
    body = (
        MINE + "{fence} bar.sync 0; setp.eq.u32 %p1, %tid, 0;\n"
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 128;\n"
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    )
    run_ptx(body.format(fence="fence.proxy.async.shared::cta;"), y, shared=128, race=True, proxy=True)
    assert y.tolist() == list(range(32))
    with pytest.raises(Hazard, match=r"proxy: asynchronous read of a generic write without fence\.proxy\.async"):
        run_ptx(body.format(fence=""), y, shared=128, race=True, proxy=True)


# Warp 0 copies 512 bytes to shared memory and does not wait; warp 1 waits for the copies' own arrivals.
GATHER = """
    mov.u32 %r1, smem; {barrier}
    shl.b32 %r2, %lane, 4; add.u32 %r3, %r1, %r2; cvt.u64.u32 %d1, %r2; add.u64 %d2, %a0, %d1;
    setp.eq.u32 %p3, %warp, 0; setp.eq.u32 %p4, %lane, 0; @!%p3 bra CONSUME;
    cp.async.cg.shared.global [%r3], [%d2], 16;
    {arrive} bra DONE;
    CONSUME: {wait} {consume} DONE:
"""
ARRIVAL = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+512];"
FENCE = "fence.proxy.async.shared::cta;"
BULK_STORE = (
    "@%p4 cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r1], 512;\n"
    "@%p4 cp.async.bulk.commit_group; @%p4 cp.async.bulk.wait_group 0;"
)


def gather(arrive: str, consume: str, count: int = 32, schedule: str = "eager") -> None:
    x, y = torch.arange(128, dtype=torch.int32), empty(128)
    body = GATHER.format(barrier=BARRIER.format(count=count), arrive=arrive, wait=WAIT, consume=consume)
    run_ptx(body, x, y, block=64, shared=520, race=True, proxy=True, schedule=schedule)
    assert torch.equal(x, y)


@pytest.mark.parametrize("schedule", ["eager", "late", "random", "priority"])
def test_asynchronous_reads_of_copies_need_a_fence_where_their_arrival_is_seen(schedule):
    """Copies that complete on an mbarrier are generic writes that their producer cannot fence; the consumer must."""
    gather(ARRIVAL, FENCE + BULK_STORE, schedule=schedule)
    for arrive, consume in ((ARRIVAL, BULK_STORE), (FENCE + ARRIVAL, BULK_STORE), (ARRIVAL, BULK_STORE + FENCE)):
        with pytest.raises(Hazard, match=r"proxy: asynchronous read of a generic write without fence\.proxy\.async"):
            gather(arrive, consume, schedule=schedule)


def test_an_arrival_covers_the_copies_of_its_own_lane():
    with pytest.raises(Hazard, match="read is not ordered after write"):
        gather(f"@%p4 {ARRIVAL}", FENCE + BULK_STORE, count=1)
    gather(f"@%p4 {ARRIVAL} @!%p4 {ARRIVAL}", FENCE + BULK_STORE)


def test_source_of_a_bulk_store_is_reused_before_it_was_read():
    y = empty(32)
    body = (
        MINE + "fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p1, %tid, 0;\n"
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 128;\n"
        "@%p1 cp.async.bulk.commit_group; {wait} bar.sync 0; st.shared.b32 [%r3], 0;\n"
        "@%p1 cp.async.bulk.wait_group 0;"
    )
    run_ptx(body.format(wait="@%p1 cp.async.bulk.wait_group.read 0;"), y, shared=128, race=True, proxy=True)
    with pytest.raises(Hazard, match="write is not ordered after read"):
        run_ptx(body.format(wait=""), y, shared=128, race=True, proxy=True)


GLOBAL = """
    setp.eq.u32 %p1, %tid, 0; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p2, %r1, 0; @!%p1 bra DONE; @!%p2 bra READER;
    st.global.b32 [%a0], 5; {release} bra DONE;
    READER: {acquire} ld.global.b32 %r5, [%a0]; st.global.b32 [%a2], %r5; DONE:
"""


def test_global_memory_between_ctas():
    data, flag, out = empty(1), empty(1), empty(1)
    release = "st.release.gpu.global.b32 [%a1], 1;"
    acquire = "SPIN: ld.acquire.gpu.global.b32 %r2, [%a1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra SPIN;"
    run_ptx(GLOBAL.format(release=release, acquire=acquire), data, flag, out, grid=2, race=True)
    assert out.item() == 5
    for tensor in (data, flag, out):
        tensor.zero_()
    relaxed = {"release": release.replace("release", "relaxed"), "acquire": acquire.replace("acquire", "relaxed")}
    with pytest.raises(Hazard, match="global memory, arg0"):
        run_ptx(GLOBAL.format(**relaxed), data, flag, out, grid=2, race=True)
    for tensor in (data, flag, out):
        tensor.zero_()
    fence = "fence.acq_rel.gpu;"
    fenced = {"release": fence + relaxed["release"], "acquire": relaxed["acquire"] + fence}
    run_ptx(GLOBAL.format(**fenced), data, flag, out, grid=2, race=True)


# Warp 0 hands a word to warp 1, by a relaxed arrival and a relaxed wait. Warp 1 writes what warp 0 has read.
RELAXED = """
    mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p2, %warp, 0; setp.eq.u32 %p4, %lane, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; bar.sync 0; @!%p2 bra READER;
    {warp_0} bar.warp.sync -1; {release}
    @%p1 mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1]; bra DONE;
    READER: WAIT: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;
    {acquire} {warp_1} DONE:
"""
RELEASE = "fence.release.sync_restrict::shared::cta.cluster;"
ACQUIRE = "fence.acquire.sync_restrict::shared::cluster.cluster;"
STORE, LOAD = "@%p4 st.shared.b32 [%r1+8], 1;", "@%p4 ld.shared.b32 %r2, [%r1+8];"


def relaxed(warp_0: str = STORE, warp_1: str = LOAD, release: str = "@%p1 " + RELEASE, acquire: str = ACQUIRE) -> None:
    text = RELAXED.format(warp_0=warp_0, warp_1=warp_1, release=release, acquire=acquire)
    run_ptx(text, block=64, shared=16, race=True, target="sm_100a")


@pytest.mark.parametrize("words", [(STORE, LOAD), (LOAD, STORE), (STORE, STORE)])
def test_relaxed_arrivals_and_waits_need_fences(words):
    relaxed(*words)
    relaxed(*words, release="fence.acq_rel.cta;", acquire="fence.sc.cluster;")
    relaxed(*words, release="fence.acq_rel.gpu;", acquire="fence.acq_rel.sys;")
    for dropped in ({"release": ""}, {"acquire": ""}, {"release": ACQUIRE}, {"acquire": RELEASE}):
        with pytest.raises(Hazard, match="shared memory of rank 0"):
            relaxed(*words, **dropped)


def test_a_fence_covers_what_its_lanes_have_done_before():
    relaxed(warp_0=RELEASE + STORE, release="@%p1 " + RELEASE)
    with pytest.raises(Hazard, match="read is not ordered after write"):
        relaxed(warp_0=RELEASE + STORE, release="")
    with pytest.raises(Hazard, match="read is not ordered after write"):
        relaxed(warp_0="@!%p4 st.shared.b32 [%r1+8], 1; @%p1 " + RELEASE, release="")


# Warp 0 of CTA 1 reads what all lanes of warp 0 of CTA 0 have written. One lane releases, one lane acquires.
WARPS = """
    setp.eq.u32 %p1, %lane, 0; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p2, %r1, 0; shl.b32 %r3, %lane, 2;
    cvt.u64.u32 %d1, %r3; add.u64 %d2, %a0, %d1; add.u64 %d3, %a2, %d1; @!%p2 bra READER;
    st.global.b32 [%d2], 5; {written} @%p1 st.release.gpu.global.b32 [%a1], 1; bra DONE;
    READER: @!%p1 bra READ; SPIN: ld.acquire.gpu.global.b32 %r2, [%a1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra SPIN;
    READ: {acquired} {guard} ld.global.b32 %r5, [%d2]; st.global.b32 [%d3], %r5; DONE:
"""


def test_global_memory_between_lanes_of_warps():
    """A lane releases and acquires for its warp only if the warp synchronises."""

    def run(written: str = "bar.warp.sync -1;", acquired: str = "bar.warp.sync -1;", guard: str = "") -> None:
        text = WARPS.format(written=written, acquired=acquired, guard=guard)
        run_ptx(text, empty(32), empty(1), empty(32), grid=2, race=True)

    run()
    run(acquired="", guard="@%p1")
    for dropped in ({"written": ""}, {"acquired": ""}):
        with pytest.raises(Hazard, match="global memory, arg0"):
            run(**dropped)


HANDED_ON = """
    mov.u32 %r4, smem; setp.eq.u32 %p1, %tid, 0; setp.eq.u32 %p4, %tid, 32; mov.u32 %r1, %ctaid.x;
    @%p1 mbarrier.init.shared.b64 [%r4], 1; bar.sync 0; setp.eq.u32 %p2, %r1, 0; @!%p2 bra READER;
    @%p1 st.global.b32 [%a0], 5; @%p1 st.release.gpu.global.b32 [%a1], 1; bra DONE;
    READER: @!%p1 bra MEET; SPIN: ld.acquire.gpu.global.b32 %r2, [%a1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra SPIN;
    MEET: {meet} @%p4 ld.global.b32 %r5, [%a0]; @%p4 st.global.b32 [%a2], %r5; DONE:
"""
MEETINGS = {
    "bar": "bar.sync 1, 64;",
    "mbarrier": "@%p1 mbarrier.arrive.shared.b64 _, [%r4]; "
    "WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r4], 0; @!%p5 bra WAIT;",
}


@pytest.mark.parametrize("meeting", MEETINGS)
def test_what_another_cta_released_is_handed_on_at_barriers(meeting):
    """One warp acquires, another one reads."""
    data, flag, out = empty(1), empty(1), empty(1)
    run_ptx(HANDED_ON.format(meet=MEETINGS[meeting]), data, flag, out, grid=2, block=64, shared=16, race=True)
    assert out.item() == 5
    flag.zero_()
    seen = "AGAIN: ld.relaxed.gpu.global.b32 %r2, [%a1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra AGAIN;"
    with pytest.raises(Hazard, match="global memory, arg0"):
        run_ptx(HANDED_ON.format(meet=seen), data, flag, out, grid=2, block=64, shared=16, race=True)


def test_a_fence_acquires_reads_of_before_whatever_was_written_since():
    data, flag, out = empty(1), empty(1), empty(32)
    acquire = (
        "SPIN: ld.relaxed.gpu.global.b32 %r2, [%a1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra SPIN;\n"
        + "".join(f"st.release.gpu.global.b32 [%a2+{4 * i}], 1;\n" for i in range(1, 32))
        + "fence.acq_rel.gpu;"
    )
    release = "st.release.gpu.global.b32 [%a1], 1;"
    run_ptx(GLOBAL.format(release=release, acquire=acquire), data, flag, out, grid=2, race=True)


def test_two_ctas_write_the_same_element():
    y = empty(1)
    with pytest.raises(Hazard, match="write is not ordered after write"):
        run_ptx("mov.u32 %r1, %ctaid.x; st.global.b32 [%a0], %r1;", y, grid=2, race=True)
    run_ptx("atom.global.add.u32 %r1, [%a0], 1;", y, grid=2, race=True)


def test_the_same_schedule_again():
    """A seed decides the schedule: the order of two warps' atomics."""
    body = "atom.global.exch.b32 %r5, [%a0], %warp;"

    def last(seed: int, schedule: str) -> int:
        y = torch.full((1,), -1, dtype=torch.int32)
        run_ptx(body, y, block=256, seed=seed, schedule=schedule)
        return int(y.item())

    for schedule in ("random", "priority"):
        results = [last(seed, schedule) for seed in range(12)]
        assert results == [last(seed, schedule) for seed in range(12)]
        assert len(set(results)) > 1


ROW = "mov.u32 %r1, smem; shl.b32 %r2, %lane, 4; add.u32 %r3, %r1, %r2; xor.b32 %r4, %r2, 16; add.u32 %r4, %r1, %r4;\n"
SYNC = "bar.warp.sync -1;"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("st.shared.b32 [%r3], %lane;", "ld.shared.b32 %r5, [%r4];"),
        ("ld.shared.b32 %r5, [%r3];", "st.shared.b32 [%r4], %lane;"),
        ("st.shared.b32 [%r3], %lane;", "st.shared.b32 [%r4], %lane;"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r6, %r7, %r8, %r9};", "ld.shared.b32 %r5, [%r3];"),
        ("st.shared.b32 [%r3], 0;", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r3];"),
    ],
    ids=["write-read", "read-write", "write-write", "stmatrix", "ldmatrix"],
)
def test_lanes_of_a_warp_need_a_warp_barrier(first, second):
    run_ptx(ROW + first + SYNC + second, shared=512, race=True)
    run_ptx(ROW + first + "bar.sync 0;" + second, shared=512, race=True)
    with pytest.raises(Hazard, match="is not ordered after"):
        run_ptx(ROW + first + second, shared=512, race=True)


def test_lanes_need_no_barrier_for_what_is_their_own():
    run_ptx(ROW + "st.shared.b32 [%r3], 1; ld.shared.b32 %r5, [%r3]; st.shared.b32 [%r3], 2;", shared=512, race=True)
    # One instruction with which all lanes write the same place.
    run_ptx(ROW + f"st.shared.b32 [%r1], 1; {SYNC} ld.shared.b32 %r5, [%r1];", shared=512, race=True)


def test_an_mbarrier_orders_lanes_too():
    body = ROW + BARRIER.format(count=32) + "st.shared.b32 [%r3], %lane; mbarrier.arrive.shared.b64 _, [%r1+512];\n"
    run_ptx(body + WAIT + "ld.shared.b32 %r5, [%r4];", shared=520, race=True)
    with pytest.raises(Hazard, match="read is not ordered after write"):
        run_ptx(body + "ld.shared.b32 %r5, [%r4];" + WAIT, shared=520, race=True)


def test_a_warp_that_arrives_twice_at_a_barrier():
    """A producer skips the wait for its consumer; its second arrival replaces the consumer's arrival."""
    body = "setp.eq.u32 %p1, %warp, 0; @%p1 bra FIRST; {second} bra DONE; FIRST: {first} DONE:"
    pair = {
        "first": "bar.arrive 1, 64; bar.sync 2, 64; bar.arrive 1, 64;",
        "second": "bar.sync 1, 64; bar.arrive 2, 64;",
    }
    run_ptx(body.format(first=pair["first"], second=pair["second"] + "bar.sync 1, 64;"), block=64, race=True)
    with pytest.raises(Hazard, match="barrier: warp 0 arrives at barrier 1 again before it completes"):
        run_ptx(body.format(first="bar.arrive 1, 64; bar.arrive 1, 64;", second=""), block=64, race=True)
