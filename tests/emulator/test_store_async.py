"""st.async and red.async: stores and reductions in the shared memory of a peer that complete bytes of its mbarrier."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.device.copies import CLUSTER, DUMP, MEET, SETUP, WAIT
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Hazard, MemoryFault, Unsupported


@pytest.mark.parametrize(("kind", "registers"), [("b32", 1), ("v2.b32", 2), ("v4.b32", 4), ("b64", 2), ("v2.b64", 4)])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_asynchronous_stores_complete_bytes_of_the_peers_barrier(kind, registers, schedule):
    """Each lane of CTA 0 stores to CTA 1, whose barrier waits for the bytes of all lanes."""
    out, size = empty(2 * 32 * registers), 4 * registers
    values = ", ".join(f"%r{40 + k}" for k in range(registers))
    wide = "mov.b64 %d10, {%r40, %r41}; mov.b64 %d11, {%r42, %r43};" if "b64" in kind else ""
    source = {"b32": "%r40", "b64": "%d10", "v2.b64": "{%d10, %d11}"}.get(kind, f"{{{values}}}")
    fill = "".join(f"mad.lo.u32 %r{40 + k}, %tid, {registers}, {100 + k};" for k in range(4))
    body = (
        CLUSTER.format(size=32 * size, announced=32 * size).replace("@%p1 mbarrier.arrive", "mov.u32 %r8, "
        "%cluster_ctarank; setp.eq.and.u32 %p6, %r8, 1, %p1; @%p6 mbarrier.arrive")
        + f"mapa.shared::cluster.u32 %r11, %r1, 1; mapa.shared::cluster.u32 %r12, %r2, 1; {fill} {wide}"
        + f"mad.lo.u32 %r11, %tid, {size}, %r11; setp.eq.u32 %p5, %r8, 1; @%p5 bra RECEIVE;\n"
        + f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r11], {source}, [%r12]; bra MET;\n"
        + "RECEIVE: " + WAIT.replace("%a1", "%a0") + DUMP.format(bytes=32 * size).replace("%a1", "%a0") + "MET:" + MEET
    )  # fmt: skip
    run_ptx(body.replace("%a1, %a1", "%a0, %a0"), out, shared=1024 + 16, grid=2, cluster=2, race=True, proxy=True,
            schedule=schedule)  # fmt: skip
    assert out[32 * registers :].tolist() == list(range(100, 100 + 32 * registers))


def test_an_asynchronous_store_signals_the_cta_that_it_writes():
    body = (
        CLUSTER.format(size=0, announced=128).replace("%a1", "%d7")
        + "mapa.shared::cluster.u32 %r11, %r1, 1; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32"
        " [%r11], %tid, [%r2];"
    )
    with pytest.raises(MemoryFault, match="or in another CTA"):
        run_ptx(body, shared=1024 + 16, grid=2, cluster=2)


# ------------------------------------------------------------------ red.async
REDUCED = {  # operation and type -> the word that 2 CTAs' reductions with lane + 3 make of -5
    "add.u32": lambda lane: -5 + 2 * (lane + 3), "add.s32": lambda lane: -5 + 2 * (lane + 3),
    "min.u32": lambda lane: lane + 3, "max.u32": lambda lane: -5, "min.s32": lambda lane: -5,
    "max.s32": lambda lane: lane + 3,
    "and.b32": lambda lane: -5 & lane + 3, "or.b32": lambda lane: -5 | lane + 3, "xor.b32": lambda lane: -5,
    "inc.u32": lambda lane: 1, "dec.u32": lambda lane: lane + 2,
}  # fmt: skip


def reduce_in_cta_1(operation: str, is_ordered: bool = True, **settings) -> list[int]:
    """Return words of CTA 1, -5 at first, to which every lane of both CTAs applies ``operation``."""
    out = empty(64)
    size = 8 if operation.endswith("64") else 4
    value = "%d10" if size == 8 else "%r40"
    first = "st.shared.b64 [%r9], %d11;\n" if size == 8 else "st.shared.b32 [%r9], %r41;\n"
    body = (
        SETUP.format(bar=1024) + "mov.u32 %r8, %cluster_ctarank; fence.mbarrier_init.release.cluster;\n"
        f"mad.lo.u32 %r9, %tid, {size}, %r1; mov.b64 %d11, -5; cvt.u32.u64 %r41, %d11;\n"
        "setp.eq.and.u32 %p6, %r8, 1, %p1;\n"
        f"@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {64 * size};\n"
        + (first + MEET if is_ordered else MEET + first) +
        "mapa.shared::cluster.u32 %r11, %r9, 1; mapa.shared::cluster.u32 %r12, %r2, 1; add.u32 %r40, %tid, 3;\n"
        f"cvt.u64.u32 %d10, %r40;\n"
        f"red.async.relaxed.cluster.mbarrier::complete_tx::bytes.{operation} [%r11], {value}, [%r12];\n"
        "setp.ne.u32 %p5, %r8, 1; @%p5 bra MET;\n"
        + WAIT + DUMP.format(bytes=32 * size).replace("%a1", "%a0") + "MET:" + MEET
    )  # fmt: skip
    run_ptx(body, out, shared=1024 + 16, grid=2, cluster=2, **{"race": True, "proxy": True, **settings})
    return out.tolist()


@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("operation", REDUCED)
def test_asynchronous_reductions(operation, schedule):
    words = reduce_in_cta_1(operation, schedule=schedule)[:32]
    assert words == [REDUCED[operation](lane) for lane in range(32)]


def test_asynchronous_reductions_of_64_bits():
    words = np.array(reduce_in_cta_1("add.u64"), np.int32).view(np.int64)
    assert words.tolist() == [-5 + 2 * (lane + 3) for lane in range(32)]


def test_an_asynchronous_reduction_races_with_stores_of_another_cta():
    """Nothing orders CTA 0's reductions after the stores of CTA 1 behind the cluster's barrier."""
    with pytest.raises(Hazard, match=r"red\.async"):
        reduce_in_cta_1("add.u32", is_ordered=False)


def test_reductions_that_hardware_lacks():
    with pytest.raises(Unsupported, match=r"add\.f32"):
        reduce_in_cta_1("add.f32")
