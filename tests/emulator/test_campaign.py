"""The fault campaign: its faults, its detections, and its result for the prefill kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.device.equivalent_faults import reason_of_tensor_wait
from helpers.device.ptx import empty, module_text, run_ptx

from hopwell import emulator
from hopwell.emulator.ptx import parse_module
from hopwell.emulator.tools.campaign import Campaign, run_campaign, summary
from hopwell.emulator.tools.faults import faults, waits
from tests.emulator import campaign_blackwell, campaign_blackwell_decode, campaign_prefill, campaign_sm120

# Warp 0 hands 32 numbers to warp 1, which doubles them. The second bar.sync orders nothing.
HAND_OVER = """
    mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r1+512], 1; bar.sync 0; bar.sync 0;
    shl.b32 %r2, %lane, 2; add.u32 %r3, %r1, %r2; setp.eq.u32 %p3, %warp, 0; @!%p3 bra CONSUME;
    st.shared.b32 [%r3], %lane; bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 _, [%r1+512]; bra DONE;
    CONSUME: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+512], 0; @!%p2 bra CONSUME;
    ld.shared.b32 %r5, [%r3]; shl.b32 %r5, %r5, 1; cvt.u64.u32 %d1, %r2; add.u64 %d2, %a0, %d1;
    st.global.b32 [%d2], %r5;
    DONE:
"""


def hand_over() -> None:
    y = empty(32)
    run_ptx(HAND_OVER, y, block=64, shared=520)
    assert y.tolist() == list(range(0, 64, 2))


def outcomes(campaign: Campaign) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for o in campaign.outcomes:
        found.setdefault(o.fault.kind, []).append(o.found)
    return found


def test_faults_of_a_hand_over():
    said: list[str] = []
    campaign = run_campaign(hand_over, say=said.append)
    found = outcomes(campaign)
    assert found["drop mbarrier wait"] == ["race"]
    assert found["flip wait parity"] == ["deadlock"]
    assert found["drop mbarrier.arrive"] == ["deadlock"]
    assert found["one arrival too many expected"] == ["deadlock"]
    assert found["one arrival too few expected"] == ["error"]
    assert found["drop bar.warp.sync"] == ["race"]
    assert found["drop global store"] == ["wrong result"]
    # Either of the two barriers alone is enough, with any barrier number.
    assert found["drop bar.sync"] == found["wrong barrier number"] == ["", ""]
    assert len(campaign.undetected()) == 4
    assert 0 < campaign.rate < 1
    assert any("NOT DETECTED" in line for line in said)
    assert "undetected at PTX lines" in "\n".join(summary(campaign))


def test_faults_of_fences_at_relaxed_barriers():
    """The arrival and the wait are relaxed. Fences restricted to shared memory order the hand-over."""
    release = "@%p1 fence.release.sync_restrict::shared::cta.cluster; @%p1 mbarrier.arrive.relaxed.cluster"
    text = HAND_OVER.replace("@%p1 mbarrier.arrive.shared", f"{release}.shared::cluster")
    text = text.replace("parity.shared", "parity.relaxed.cluster.shared::cta")
    text = text.replace("ld.shared.b32 %r5", "fence.acquire.sync_restrict::shared::cluster.cluster; ld.shared.b32 %r5")
    with emulator.use("sm_100a"):
        campaign = run_campaign(lambda: run_ptx(text, empty(32), block=64, shared=520, target="sm_100a"), say=[].append)
    found = outcomes(campaign)
    assert found["drop fence.release"] == found["drop fence.acquire"] == ["race"]


# CTA 0 commits a product (tcgen05.shift stands for it) to both CTAs; CTA 1 answers at CTA 0's second mbarrier.
PAIR = """
    mov.u32 %r1, smem; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %tid, 0; mov.u32 %r9, 7; add.u32 %r4, %r1, 16;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; @%p1 mbarrier.init.shared.b64 [%r1+8], 1;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r4], 32; ld.shared.b32 %r3, [%r4];
    fence.mbarrier_init.release.cluster; tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3], {%r9,%r9,%r9,%r9,%r9,%r9,%r9,%r9};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; tcgen05.fence::after_thread_sync;
    setp.eq.and.u32 %p3, %r2, 0, %p1; mov.b16 %h1, 3; @%p3 tcgen05.shift.cta_group::2.down [%r3];
    @%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
    tcgen05.fence::after_thread_sync; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r3];
    tcgen05.wait::ld.sync.aligned; mov.u32 %r6, 0; mapa.shared::cluster.u32 %r7, %r1, %r6; add.u32 %r7, %r7, 8;
    setp.eq.and.u32 %p4, %r2, 1, %p1; bar.warp.sync -1;
    @%p4 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7]; setp.eq.u32 %p5, %r2, 1; @%p5 bra FREE;
    ANSWER: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], 0; @!%p2 bra ANSWER;
    FREE: tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r3, 32;
"""


def test_faults_of_a_pair():
    with emulator.use("sm_100a"):
        campaign = run_campaign(
            lambda: run_ptx(PAIR, grid=2, cluster=2, shared=24, target="sm_100a"), say=lambda _: None
        )
    found = outcomes(campaign)
    assert found["drop tcgen05.fence"] == ["race"] * 3
    assert found["drop tcgen05.commit"] == found["commit to one CTA"] == found["drop remote arrive"] == ["deadlock"]
    assert found["own CTA for a peer"] == ["deadlock"]
    assert "drop mbarrier.arrive" not in found


# Two warps vote whether to read each other's numbers. Only warp 0 asks for it.
VOTE = """
    mov.u32 %r1, smem; shl.b32 %r2, %tid, 2; add.u32 %r3, %r1, %r2; st.shared.b32 [%r3], %tid;
    setp.eq.u32 %p1, %warp, 1; mov.u32 %r6, 1; barrier.cta.red.and.pred %p2, %r6, 64, %p1; mov.u32 %r5, 0;
    xor.b32 %r4, %r2, 128; add.u32 %r4, %r1, %r4; @!%p2 ld.shared.b32 %r5, [%r4];
    cvt.u64.u32 %d1, %r2; add.u64 %d2, %a0, %d1; st.global.b32 [%d2], %r5;
"""


def test_faults_of_a_vote():
    def vote() -> None:
        y = empty(64)
        run_ptx(VOTE, y, block=64, shared=256)
        assert y.tolist() == [*range(32, 64), *range(32)]

    found = outcomes(run_campaign(vote, say=lambda _: None))
    assert found["barrier waits for one warp more"] == ["deadlock"]
    assert len(found["vote without the others"]) == 1
    assert all(found["vote without the others"])


# Warp 1 polls, and writes meanwhile, until a copy by warp 0 is complete. The second bar.sync orders nothing.
POLL = """
    mov.u32 %r1, smem; setp.eq.u32 %p1, %tid, 0; @%p1 mbarrier.init.shared.b64 [%r1+128], 1;
    shl.b32 %r2, %lane, 2; add.u32 %r3, %r1, %r2; setp.eq.u32 %p3, %warp, 0; @%p3 st.shared.b32 [%r3], %lane;
    fence.proxy.async.shared::cta; bar.sync 0; bar.sync 0; @!%p3 bra POLL;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 128;
    @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;
    @%p1 mbarrier.arrive.shared.b64 _, [%r1+128]; bra DONE;
    POLL: st.shared.b32 [%r1+136], %r1; mbarrier.test_wait.parity.shared.b64 %p2, [%r1+128], 0; @!%p2 bra POLL;
    DONE:
"""


def test_polling_in_the_late_schedule_is_no_deadlock():
    """A copy takes 200000 instructions there if warps progress."""
    campaign = run_campaign(
        lambda: run_ptx(POLL, empty(32), block=64, shared=140), kinds=["drop bar.sync"], say=lambda _: None
    )
    assert outcomes(campaign)["drop bar.sync"] == ["", ""]


def test_a_commit_before_its_product():
    text = """
        mov.u32 %r1, smem; mov.u32 %r3, 0; mov.b64 %d1, 0;
        tcgen05.mma.cta_group::1.kind::f16 [%r3], %d1, %d1, %r3, 0; add.u32 %r3, %r3, 1;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
        tcgen05.mma.cta_group::1.kind::f16 [%r3], %d1, %d1, %r3, 0; mov.u32 %r1, smem;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
    """
    kernel = parse_module(module_text(text, [], shared=16, target="sm_100a"))["k"]
    planted = [f for f in faults(kernel) if f.kind == "commit before its last product"]
    assert [[kernel.instrs[pc].parts[1] for pc in f.sites] for f in planted] == [["mma", "commit"]]
    assert [i.parts[1] for _, i in planted[0].edits] == ["commit", "mma"]


# A warp loads two columns of tensor memory, waits behind each load, and stores the sum.
TWO_LOADS = """
    mov.u32 %r1, smem; mov.u32 %r9, 7; setp.eq.u32 %p1, %lane, 40; mov.u32 %r2, 1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r3, [%r1];
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {{%r9, %r9}}; tcgen05.wait::st.sync.aligned; {before}
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r3]; {join} tcgen05.wait::ld.sync.aligned; {between}
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r6}}, [%r3+1]; {guard} tcgen05.wait::ld.sync.aligned;
    add.u32 %r7, %r5, %r6; add.u32 %r7, %r7, %r2; shl.b32 %r4, %lane, 2; cvt.u64.u32 %d1, %r4; add.u64 %d2, %a0, %d1;
    st.global.b32 [%d2], %r7; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
"""


# Only warps that take this way have another load in flight.
OTHER_WAY = "@!%p1 bra HERE; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r3]; bra JOIN; HERE:"


def two_loads(**parts: str) -> str:
    return TWO_LOADS.format(**dict.fromkeys(("before", "join", "between", "guard"), "") | parts)


def found_and_reasons(**parts: str) -> list[tuple[str, str]]:
    """Return for each dropped wait for loads how it was detected, and a reason if it changes nothing."""

    def case() -> None:
        run_ptx(two_loads(**parts), empty(32), shared=16, target="sm_100a")

    with emulator.use("sm_100a"):
        campaign = run_campaign(case, kinds=["drop tcgen05.wait"], say=lambda _: None, equivalent=reason_of_tensor_wait)
    return [(o.found, o.reason) for o in campaign.outcomes if "wait::ld" in o.fault.text]


def reasons_of_waits(**parts: str) -> list[bool]:
    """Return for each dropped wait for loads whether a rule says that it changes nothing."""
    kernel = parse_module(module_text(two_loads(**parts), [8], shared=16, target="sm_100a"))["k"]
    dropped = [fault for fault in faults(kernel) if fault.kind == "drop tcgen05.wait" and "wait::ld" in fault.text]
    return [bool(reason_of_tensor_wait(fault, kernel)) for fault in dropped]


def test_a_wait_that_the_next_one_covers() -> None:
    """The first wait changes nothing: nothing needs its load before the second wait, which waits for both."""
    (first, reason), (second, other) = found_and_reasons(between="mov.u32 %r2, 3; ld.shared.b32 %r8, [%r1];")
    assert (first, bool(reason)) == ("", True)
    assert (bool(second), other) == (True, "")
    assert reasons_of_waits(between="EARLIER: add.u32 %r2, %r2, 1;") == [True, False]


@pytest.mark.parametrize("between", ["add.u32 %r2, %r5, 1;", "add.u32 %r5, %r9, 1;"], ids=["use", "overwrite"])
def test_a_wait_before_its_registers_are_accessed(between: str) -> None:
    assert [(bool(found), reason) for found, reason in found_and_reasons(between=between)] == [(True, "")] * 2
    assert reasons_of_waits(between=between) == [False, False]


@pytest.mark.parametrize(
    "parts",
    [
        dict(between="tcgen05.fence::before_thread_sync;"),
        dict(between="bar.sync 0;"),
        dict(between="@%p1 mbarrier.arrive.shared.b64 _, [%r1+8];"),
        dict(between="tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r9};"),
        dict(between="st.release.gpu.global.b32 [%a0], %r9;"),
        dict(between="@%p1 bra NEXT; NEXT:"),
        dict(between="mov.u32 %r2, %r8;", join="JOIN:", before=OTHER_WAY),
        dict(guard="@!%p1"),
        dict(
            before="tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r3]; @%p1 tcgen05.wait::ld.sync.aligned;",
            between="mov.u32 %r2, %r8;",
        ),
    ],
    ids=lambda parts: " ".join(parts.values()),
)
def test_a_wait_that_others_may_rely_on(parts: dict[str, str]) -> None:
    """Others may overwrite tensor memory, or another load may be without a wait, so no rule covers the first wait."""
    assert reasons_of_waits(**parts)[-2:] == [False, False]


# A warp waits for room in a queue at the end of each round, and again before it posts.
ROUNDS = """
    mov.u32 %r1, smem; mov.u32 %r2, 0; ROUND: add.u32 %r2, %r2, 1; setp.eq.u32 %p3, %r2, 9; @%p3 bra POST; {between}
    POST: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra POST; st.shared.b32 [%r1+8], %r2;
    {apart} ROOM: mbarrier.try_wait.parity.shared.b64 %p1, [{room}], 0; @!%p1 bra ROOM; {behind}
    setp.lt.u32 %p2, %r2, 4; @%p2 bra ROUND;
"""


@pytest.mark.parametrize(
    ("parts", "repeated"),
    [
        ({}, [False, True]),
        (dict(between="ld.global.b32 %r3, [%a0];"), [False, True]),
        (dict(between="st.global.b32 [%a0], %r2;"), [False, False]),
        (dict(behind="mbarrier.arrive.shared.b64 _, [%r1+16];"), [False, False]),
        (dict(room="%r1+16"), [False, False]),
    ],
    ids=str,
)
def test_a_wait_that_a_post_repeats(parts: dict[str, str], repeated: list[bool]) -> None:
    apart = "add.u32 %r4, %r2, 1;" * 12  # neighbours with one barrier are one wait
    text = ROUNDS.format(apart=apart, **dict(between="", behind="", room="%r1") | parts)
    kernel = parse_module(module_text(text, [8], shared=24, target="sm_100a"))["k"]
    found = [campaign_blackwell.is_repeated_before_effects(kernel, group[-1].pc) for group in waits(kernel)]
    assert found == repeated


def test_reasons_and_kinds():
    reasons = run_campaign(
        hand_over, kinds=["drop bar.sync"], say=lambda _: None, equivalent=lambda fault, kernel: "there are two"
    )
    assert set(outcomes(reasons)) == {"drop bar.sync"}
    assert reasons.rate == 1
    assert not reasons.undetected()


def test_the_recorded_memory_may_be_gone():
    """A campaign works on copies and leaves the original memory alone."""
    kept: list[torch.Tensor] = []

    def case() -> None:
        kept.append(empty(32))
        run_ptx(HAND_OVER, kept[0], block=64, shared=520)
        kept[0].fill_(-1)

    run_campaign(case, kinds=["drop global store", "drop mbarrier.arrive"], say=lambda _: None)
    assert kept[0].eq(-1).all()


def test_a_case_that_launches_nothing():
    with pytest.raises(emulator.EmulatorError, match="launched no kernel"):
        run_campaign(lambda: None, say=lambda _: None)


@pytest.mark.emulator
@pytest.mark.nightly
def test_prefill_kernel():
    campaign = run_campaign(campaign_prefill.case, say=lambda _: None, equivalent=campaign_prefill.equivalent)
    assert len(campaign.effective()) > 100
    assert campaign.rate >= 0.99, "\n".join(summary(campaign))


FENCES = ["drop fence.release", "drop fence.acquire"]
OF_PAIRS = ["drop remote arrive", "commit to one CTA", "own CTA for a peer", *FENCES]


@pytest.mark.emulator
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "more_kinds"),
    [
        (campaign_blackwell.case, []),
        (campaign_blackwell.prefill_e4m3, []),
        (campaign_blackwell.prefill_pair, OF_PAIRS),
        (campaign_blackwell.mla, OF_PAIRS),
        (campaign_blackwell.mla_e4m3, OF_PAIRS),
        (campaign_blackwell.mla_invariant, [*OF_PAIRS, "drop fence.acq_rel"]),
    ],
)
def test_blackwell_kernels(case: Callable[[], None], more_kinds: list[str]) -> None:
    """Faults specific to Blackwell; all faults would take minutes. emulator/README.md has the result of all kinds."""
    kinds = ["drop tcgen05.wait", "drop tcgen05.commit", "drop tcgen05.dealloc", "drop tcgen05.fence", *more_kinds]
    with emulator.use("sm_100a"):
        campaign = run_campaign(case, kinds=kinds, say=lambda _: None, equivalent=campaign_blackwell.equivalent)
    assert set(outcomes(campaign)) == set(kinds)
    assert len(campaign.effective()) > 25
    assert campaign.rate == 1, "\n".join(summary(campaign))


@pytest.mark.emulator
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "effective"),
    [
        (campaign_blackwell_decode.decode, 35),
        (campaign_blackwell_decode.decode_e4m3, 57),
        (campaign_blackwell_decode.decode_e4m3_256, 59),
        (campaign_blackwell_decode.decode_nvfp4, 56),
        (campaign_blackwell_decode.decode_rows, 36),
        (campaign_blackwell_decode.decode_rows_e4m3, 58),
        (campaign_blackwell_decode.decode_32_rows_e4m3, 60),
        (campaign_blackwell_decode.decode_rows_nvfp4, 55),
        (campaign_blackwell_decode.swap_ab_mla, 75),
        (campaign_blackwell_decode.swap_ab_mla_e4m3, 75),
        (campaign_blackwell_decode.swap_ab_mla_8_bit, 36),
    ],
)
def test_blackwell_kernels_of_few_rows(case: Callable[[], None], effective: int) -> None:
    """Faults in the order of shared and tensor memory; emulator/README.md has the result of all kinds."""
    of_tensor_memory = [f"drop tcgen05.{name}" for name in ("wait", "commit", "dealloc", "fence")]
    kinds = ["drop bar.sync", "drop bar.warp.sync", "drop mbarrier.arrive", "drop fence.proxy.async", *of_tensor_memory]
    with emulator.use("sm_100a"):
        campaign = run_campaign(case, kinds=kinds, say=lambda _: None, equivalent=campaign_blackwell_decode.equivalent)
    assert set(outcomes(campaign)) == set(kinds)
    assert len(campaign.effective()) > effective
    assert campaign.rate == 1, "\n".join(summary(campaign))


@pytest.mark.emulator
@pytest.mark.nightly
@pytest.mark.parametrize(("case", "effective"), [(campaign_sm120.case, 24), (campaign_sm120.decode, 28)])
def test_sm120_kernels(case, effective: int) -> None:
    """Faults in lanes' waits for their own reads; docs/kernels/sm120.md has the result of all kinds."""
    kinds = ["drop mbarrier wait", "drop fence.proxy.async", "drop cp.async wait", "drop bar.sync"]
    with emulator.use("sm_120a"):
        campaign = run_campaign(case, kinds=kinds, say=lambda _: None, equivalent=campaign_sm120.equivalent)
    assert len(campaign.effective()) > effective
    assert campaign.rate == 1, "\n".join(summary(campaign))
