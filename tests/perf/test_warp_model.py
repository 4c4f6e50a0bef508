"""The model of mma.sync kernels: its reading of machine code, and the arithmetic of its steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hopwell.kernels.config.base import KvType
from hopwell.perf import commands as command
from hopwell.perf import resources, warp_model, warp_report
from hopwell.perf.documents import BEGIN
from hopwell.perf.mla_workloads import MLA
from hopwell.perf.sass import Sass
from hopwell.perf.steps import ALU, CONVERSION, ISSUE, MEMORY, MMA, MUFU, SHARED
from hopwell.perf.warp_model import (
    CARDS,
    HOPPER_CARD,
    PLAIN_8,
    PLAIN_16,
    SCALED_4,
    SCALED_8,
    UNPACKING,
    LoopWork,
    Shape,
    loop_work,
    predict,
    product_of,
    shared_bytes_of,
)

PRO, GEFORCE, SPARK = CARDS


@pytest.mark.parametrize(
    ("text", "kind", "depth"),
    [
        ("HMMA.16816.F32.BF16 R20, R4, R2, R20", PLAIN_16, 16),
        ("QMMA.16832.F32.E4M3.E4M3 R12, R8, R6, R12", PLAIN_8, 32),
        ("QMMA.SF.16832.F32.E4M3.E4M3.E8 R20, R4, R12, R20, R0, R8, URZ", SCALED_8, 32),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R20, R4, R8, R20, R0, R11, URZ", SCALED_4, 64),
    ],
)
def test_products(text: str, kind: str, depth: int) -> None:
    assert product_of(Sass(text, 0)) == (kind, 2 * 16 * 8 * depth)
    assert product_of(Sass("FFMA R1, R2, R3, R4", 0)) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("LDSM.16.M88 R0, [R17]", 128),
        ("LDSM.16.MT88.2 R12, [R17+0x200]", 256),
        ("LDSM.8.MT1616.2 R8, [R17+0x400]", 512),
        ("LDSM.U4x16P64TO8.MT1616 R2, [R17]", 256),
        ("LDSM.U4x16P64TO8.M816.4 R12, [R17]", 512),
        ("STSM.16.MT88.4 [R17], R12", 512),
        ("LDS R1, [R2]", 128),
        ("LDS.128 R4, [R2]", 512),
        ("STS.U16 [R2], R4", 64),
        ("LDSM_LIKE R1", 0),
        ("LDG.E.128 R4, [R2]", 0),
    ],
)
def test_bytes_of_shared_memory(text: str, size: int) -> None:
    assert shared_bytes_of(Sass(text, 0)) == size


def loop(*texts: str, first: int = 0) -> list[Sass]:
    return [*(Sass(text, 0) for text in texts), Sass("@P0 BRA `(.L_x)", 0, first)]


def test_the_loop_that_masks_least_is_read() -> None:
    masked = loop("HMMA.16816.F32 R0, R4, R2, R0", "ISETP.GE R1", "FSEL R1")
    plain = loop("LDSM.16.M88.4 R4, [R9]", "HMMA.16816.F32 R0, R4, R2, R0", "MUFU.EX2 R1, R2", first=len(masked))
    found = loop_work([*masked, *plain, Sass("EXIT", 0)])
    assert found == LoopWork({PLAIN_16: 4096}, {MUFU: 1}, 512, 4)
    with pytest.raises(ValueError, match="no loop"):
        loop_work(loop("MUFU.EX2 R1, R2"))


def test_units_of_a_step() -> None:
    """Eight warps have products of 64 x 4096 FLOP, 32 exponentials of a lane and so on."""
    does = LoopWork({PLAIN_16: 64 * 4096}, {MUFU: 32, ALU: 64}, 64 * 512, 400)
    units = predict(does, Shape(8, 32768), PRO).step.units
    assert units[MMA] == 8 * 64 * 4096 / 1024
    assert units[SHARED] == (8 * 64 * 512 + 32768) / 128
    assert (units[MUFU], units[ALU], units[ISSUE], units[MEMORY]) == (512, 256, 800, 0)
    geforce = predict(does, Shape(8, 32768), GEFORCE)
    assert geforce.step.units[MMA] == 2 * units[MMA]
    assert (geforce.step.limiter, geforce.product_share) == (MMA, 1)


def test_block_scaled_products_are_not_halved_on_geforce() -> None:
    plain, scaled = (LoopWork({kind: 8192}, {}, 0, 1) for kind in (PLAIN_8, SCALED_8))
    assert predict(plain, Shape(1, 0), GEFORCE).step.units[MMA] == 8
    assert [predict(scaled, Shape(1, 0), card).step.units[MMA] for card in CARDS] == [4, 4, 4]


def test_streams_are_limited_by_memory() -> None:
    found = predict(LoopWork({PLAIN_16: 4096}, {}, 0, 100), Shape(4, 65536, streams=True), SPARK)
    assert (found.step.limiter, found.memory_share) == (MEMORY, 1)
    assert found.step.cycles == pytest.approx(65536 * 48 * 2.5e9 / 273e9)


def test_decode_that_another_unit_limits() -> None:
    """A step has 16384 bytes, which memory delivers in 4498 cycles; the rest of the bandwidth is unused."""
    does = LoopWork({PLAIN_16: 4096}, {}, 16384, 100)
    for warps, limiter, then in ((4, MEMORY, SHARED), (64, SHARED, MEMORY)):
        found = predict(does, Shape(warps, 16384, streams=True), PRO)
        memory = 16384 / (1792e9 / 2.617e9 / 188)
        assert found.step.limiter == limiter
        assert found.memory_share == pytest.approx(memory / max(memory, (warps + 1) * 128))
        assert found.step.next_limiter == (then, pytest.approx(min(memory, (warps + 1) * 128) / found.step.cycles))


def test_units_that_are_as_busy_as_each_other() -> None:
    found = predict(LoopWork({PLAIN_16: 4096}, {}, 0, 16), Shape(1, 0), PRO)
    assert (found.step.limiter, found.step.next_limiter) == (MMA, (ISSUE, 1))


def test_unpacking_of_e4m3_is_a_conversion_of_its_own() -> None:
    code = loop("HMMA.16816.F32 R0, R4, R2, R0", "F2FP.F16.E4M3.UNPACK_B R1, R2", "F2FP.BF16.F32.PACK_AB R1, R2, R3")
    does = loop_work(code)
    assert (does.results[UNPACKING], does.results[CONVERSION]) == (1, 1)
    units = predict(does, Shape(4, 0), PRO).step.units
    assert (units[UNPACKING], units[CONVERSION]) == (6, 2)


def test_warps_that_convert_count_beside_those_that_multiply() -> None:
    multiplies = loop("LDSM.16.M88.4 R4, [R9]", "HMMA.16816.F32 R0, R4, R2, R0")
    copies = loop("LDS.128 R4, [R9]", "STS.128 [R8], R4", first=len(multiplies))
    first = len(multiplies) + len(copies)
    converts = loop("LDS.128 R4, [R9]", "F2FP.F16.E4M3.UNPACK_B R1, R4", "STS.128 [R8], R4", first=first)
    does = loop_work([*multiplies, *copies, *converts, Sass("EXIT", 0)])
    assert does.converting == LoopWork({}, {CONVERSION: 0, UNPACKING: 1}, 1024, 4)
    assert loop_work(multiplies).converting is None
    units = predict(does, Shape(8, 256, converting=4), PRO).step.units
    assert units[ISSUE] == (8 * 3 + 4 * 4) / 4
    assert units[SHARED] == (8 * 512 + 4 * 1024 + 256) / 128
    assert (units[MMA], units[UNPACKING]) == (8 * 4, 4 * 32 / (64 / 3))
    assert warp_report.prefill("prefill", (128, 128), kv_type=KvType.NVFP4).converting == 4
    assert warp_report.prefill("prefill", (128, 128)).converting == 0


def test_loops_know_their_keys_and_bytes() -> None:
    """One step has 64 keys of 576 and 512 columns, 16 rows and four warps; another is of prefill."""
    latent, first = warp_report.mla("MLA"), warp_report.prefill("prefill", (128, 128))
    does = LoopWork({PLAIN_16: 2 * 16 * 64 * (576 + 512) // 4}, {}, 0, 1)
    assert (latent.keys(does), latent.key_bytes, latent.streams) == (64, 1152, True)
    memory = latent.predict(does, PRO).step.units[MEMORY]
    assert memory == pytest.approx(64 * 1152 / (1792e9 / 2.617e9 / 188))
    assert (first.warps, first.rows, first.key_bytes, first.streams) == (8, 128, 512, False)
    narrow = warp_report.prefill("prefill", (128, 128), kv_type=KvType.NVFP4)
    assert narrow.key_bytes == 256 * 9 / 16


def test_what_stays_unhidden_counts_on_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 2048 cycles there, and 4096 on a card of half the rate; a quarter of the time is unexplained."""
    does = LoopWork({PLAIN_16: 4096 * 128}, {}, 0, 1)
    monkeypatch.setattr(warp_report, "work_of", lambda loop: does)
    one = warp_report.prefill("prefill", (128, 128))
    *_, ratio, unhidden, pro, geforce, spark = warp_report._row(
        one, "P1", one.predict(does, HOPPER_CARD), (400, 300), "TFLOP/s"
    )
    assert (ratio, unhidden) == ("0.75", "683 of 2731")
    assert (pro, geforce, spark) == ("86%", "92%", "86%")


def test_measured_rates_of_hopper_are_those_of_the_run() -> None:
    assert warp_report.rates("decode")["D2", "memory read"] > warp_report.rates("decode")["D2", warp_report.CANDIDATE]
    assert {("P1", warp_report.CANDIDATE), ("P1-fp8", warp_report.CANDIDATE)} <= set(warp_report.rates("prefill"))
    assert {("H16", warp_report.CANDIDATE), ("H16-deep", warp_report.CANDIDATE)} <= set(warp_report.rates("mla"))


def test_steps_of_mla_are_what_longer_requests_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 1 s besides its steps, which read at half of the ceiling's rate."""
    works = {case.name: case for case in MLA}
    ceiling = 100e12
    times = {name: 1.0 + works[name].work / (ceiling / 2) for name in ("H16", "H16-deep")}
    found = {(name, warp_report.CANDIDATE): works[name].work / seconds for name, seconds in times.items()}
    monkeypatch.setattr(warp_report, "rates", lambda family: defaultdict(lambda: ceiling, found))
    tile = 64 * 2 * 16 * (576 + 512)  # FLOP, of four warps
    monkeypatch.setattr(warp_report, "work_of", lambda loop, target="": LoopWork({PLAIN_16: tile // 4}, {}, 0, 1))
    *_, row = warp_report._measured_streams()
    assert row[0].endswith("beyond H16")
    assert row[4] == "0.50"


def test_the_document_has_every_loop() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels" / "sm120.md").read_text()
    assert all(loop.name in text.partition(BEGIN)[2] for loop in warp_report.loops())


def test_only_the_product_of_multiprocessors_and_clock_matters() -> None:
    does, shape = LoopWork({PLAIN_16: 4096}, {}, 512, 100), Shape(4, 16384, streams=True)
    other = replace(PRO, sms=2 * PRO.sms, clock=PRO.clock / 2)
    assert predict(does, shape, other).step == predict(does, shape, PRO).step


def test_resources_are_those_of_every_shipped_kernel_of_attention() -> None:
    for pattern in (
        "^prefill_.*_d128_causal_contiguous$",
        "^prefill_.*kv_e4m3",
        "^prefill_.*_e4m3_to_bf16_",
        "^decode_",
        "^mla_",
    ):
        assert any(resources.shipped("sm_120a", pattern)), pattern
    assert not any(resources.shipped("sm_120a", "^append_"))


def test_rates_are_the_published_ones() -> None:
    for card, kind, published in ((PRO, PLAIN_16, 504), (PRO, SCALED_4, 2015), (GEFORCE, PLAIN_8, 419)):
        assert card.sms * card.clock * card.products[kind] == pytest.approx(published * 1e12, rel=2e-3)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    code = loop("HMMA.16816.F32 R0, R4, R2, R0", "LDSM.16.M88.4 R4, [R9]")
    monkeypatch.setattr(warp_model, "disassemble", lambda cubin: code)
    done = CliRunner().invoke(command.app, ["warp-model", str(Path("k.cubin")), "--warps", "8", "--loaded-bytes", "0"])
    assert done.exit_code == 0, done.output
    for card in CARDS:
        assert f"| {card.name}" in done.output
