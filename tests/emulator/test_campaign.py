"""The fault campaign: its faults, its detections, and its result for the prefill kernel."""

from __future__ import annotations

import pytest
import torch
from helpers.device.ptx import empty, run_ptx

from hopwell import emulator
from hopwell.emulator.tools.campaign import Campaign, run_campaign, summary
from tests.emulator import campaign_blackwell, campaign_prefill, campaign_sm120

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


@pytest.mark.emulator
@pytest.mark.nightly
def test_blackwell_kernel():
    """Faults specific to Blackwell; all faults would take minutes."""
    kinds = ["drop tcgen05.wait", "drop tcgen05.commit", "drop tcgen05.dealloc"]
    with emulator.use("sm_100a"):
        campaign = run_campaign(
            campaign_blackwell.case, kinds=kinds, say=lambda _: None, equivalent=campaign_blackwell.equivalent
        )
    assert set(outcomes(campaign)) == set(kinds)
    assert len(campaign.effective()) > 15
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
