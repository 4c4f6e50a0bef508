"""Compares a Hopper GPU with the emulator, instruction by instruction.

The comparison covers results of arithmetic, accumulation of matrix products, and behaviour of asynchronous copies that
PTX leaves open. It needs no compiler except the driver's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import EmulatorError
from .approximations import HEADER, INSTRUCTIONS, compare, inputs_of
from .devices import Device, Emulated, Gpu, entry, module_text

ARCH = "sm_90a"
INT32, FLOAT32, BFLOAT16, FLOAT16 = 3, 7, 9, 6  # CUtensorMapDataType
Say = Callable[[str], None]


# ------------------------------------------------------------------ single instructions
def pointwise_text() -> str:
    entries = []
    for k, instruction in enumerate(INSTRUCTIONS):
        body = instruction.text.replace("%x", "%r2").replace("%r,", "%r3,").replace("%r;", "%r3;")
        entries.append(
            entry(
                f"pointwise_{k}",
                "u64 u32",
                f"mul.lo.u32 %r2, %index, %a1;\n{body}\nmul.wide.u32 %d0, %index, 4; add.u64 %d0, %a0, %d0; "
                "st.global.b32 [%d0], %r3;",
            )
        )
    return module_text(ARCH, *entries)


def compare_instructions(devices: list[Device], count: int, say: Say) -> list[dict[str, Any]]:
    """Compare every instruction on ``count`` inputs, a multiple of 1024."""
    text, (step, patterns) = pointwise_text(), inputs_of(count)
    say(HEADER)
    rows = []
    for k, instruction in enumerate(INSTRUCTIONS):
        results = []
        for device in devices:
            out = torch.zeros(count, dtype=torch.int32, device=device.torch_device)
            device.launch(text, count // 256, 256, 0, [out, step], kernel=f"pointwise_{k}")
            results.append(out.cpu().numpy().view(np.uint32))
        found = compare(instruction.name, instruction.kind, patterns, results[0], results[-1])
        say(found.row())
        rows.append(vars(found))
    return rows


# ------------------------------------------------------------------ accumulation of wgmma
K_BYTES, ROWS, COLUMNS, CHAIN = 32, 64, 8, 4
TILE_BYTES = CHAIN * K_BYTES * (ROWS + COLUMNS)
PRODUCTS = {
    "e4m3": "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3",
    "e5m2": "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2",
    "bf16": "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    "f16": "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
}


def product_text(kind: str) -> str:
    """Return a kernel whose CTAs each multiply a tile of their own.

    Operands of random bytes need no layout, so the kernel copies them unchanged.
    """
    # Core matrices of 8 rows x 16 bytes. The next core matrix along k follows directly; the next 8 rows follow after
    # two.
    high = 128 >> 4 << 16
    steps = []
    for k in range(CHAIN):
        a, b = k * K_BYTES * ROWS, CHAIN * K_BYTES * ROWS + k * K_BYTES * COLUMNS
        steps.append(
            f"add.u32 %r10, %r4, {a}; add.u32 %r11, %r4, {b};\n"
            f"shr.u32 %r10, %r10, 4; or.b32 %r10, %r10, {high}; shr.u32 %r11, %r11, 4; or.b32 %r11, %r11, {high};\n"
            f"mov.u32 %r12, {256 >> 4}; mov.b64 %d4, {{%r10, %r12}}; mov.b64 %d5, {{%r11, %r12}};\n"
            f"{PRODUCTS[kind]} {{%r20, %r21, %r22, %r23}}, %d4, %d5, 1, 1, 1"
            + (", 0, 0;" if kind in ("bf16", "f16") else ";")
        )
    body = (
        f"mov.u32 %r4, smem; mul.lo.u32 %r5, %block, {TILE_BYTES}; cvt.u64.u32 %d0, %r5; add.u64 %d0, %a0, %d0;\n"
        "shl.b32 %r6, %thread, 4;\n"
        f"COPY: setp.ge.u32 %p0, %r6, {TILE_BYTES}; @%p0 bra COPIED;\n"
        "cvt.u64.u32 %d1, %r6; add.u64 %d1, %d0, %d1; ld.global.v4.b32 {%r12, %r13, %r14, %r15}, [%d1];\n"
        "add.u32 %r7, %r4, %r6; st.shared.v4.b32 [%r7], {%r12, %r13, %r14, %r15};\n"
        "add.u32 %r6, %r6, 2048; bra COPY;\n"
        "COPIED: fence.proxy.async.shared::cta; bar.sync 0;\n"
        "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;\n"
        "wgmma.fence.sync.aligned;\n" + "\n".join(steps) + "\nwgmma.commit_group.sync.aligned; "
        "wgmma.wait_group.sync.aligned 0;\n"
        "mul.wide.u32 %d2, %index, 16; add.u64 %d2, %a1, %d2; st.global.v4.b32 [%d2], {%r20, %r21, %r22, %r23};"
    )
    return module_text(ARCH, entry("k", "u64 u64", body), shared=True)


def operands(kind: str, tiles: int) -> torch.Tensor:
    """Draw random bit patterns without NaN and infinity. 16-bit floats stay in a range with finite products."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (tiles * TILE_BYTES,), generator=generator, dtype=torch.uint8)
    if kind == "e4m3":
        return torch.where(raw & 0x7F == 0x7F, raw ^ 1, raw)
    if kind == "e5m2":
        return torch.where(raw & 0x7C == 0x7C, raw ^ 0x40, raw)
    values = torch.randn(tiles * TILE_BYTES // 2, generator=generator)
    scaled = values * torch.exp2(torch.randint(-6, 7, values.shape, generator=generator).float())
    return scaled.to(torch.bfloat16 if kind == "bf16" else torch.float16).view(torch.uint8)


def compare_products(devices: list[Device], tiles: int, say: Say) -> list[dict[str, Any]]:
    say("\n| matrix product | results | bit-equal | largest relative distance |\n| --- | --- | --- | --- |")
    rows = []
    for kind in PRODUCTS:
        text, data, results = product_text(kind), operands(kind, tiles), []
        for device in devices:
            out = torch.zeros(tiles * 128 * 4, dtype=torch.int32, device=device.torch_device)
            device.launch(text, tiles, 128, TILE_BYTES, [data.to(device.torch_device), out])
            results.append(out.cpu().numpy().view(np.uint32))
        first, last = (r.view(np.float32).astype(np.float64) for r in (results[0], results[-1]))
        equal = float((results[0] == results[-1]).mean())
        distance = float(np.max(np.abs(first - last) / np.maximum(np.abs(last), 1e-30)))
        rows.append({"name": kind, "values": len(first), "equal": equal, "largest_relative": distance})
        say(f"| {kind}, {CHAIN} in a chain | {len(first)} | {100 * equal:.3f} % | {distance:.2e} |")
    return rows


# ------------------------------------------------------------------ asynchronous copies
SETUP = (
    "mov.u32 %r4, smem; add.u32 %r5, %r4, 32768; mov.u32 %r30, 0; mov.u32 %r31, 4; setp.eq.u32 %p0, %thread, 0;\n"
    "@%p0 mbarrier.init.shared.b64 [%r5], 1;\n"
)
# A wait that gives up: %r9 holds whether the phase completed.
POLL = (
    "mov.u32 %r8, 0; POLL: mbarrier.try_wait.parity.shared.b64 %p1, [%r5], 0; @%p1 bra SEEN; add.u32 %r8, %r8, 1;\n"
    "setp.lt.u32 %p2, %r8, 1000; @%p2 bra POLL; SEEN: selp.b32 %r9, 1, 0, %p1;\n"
)
STORE_RESULT = "mul.wide.u32 %d2, %thread, 4; add.u64 %d2, %a1, %d2; st.global.b32 [%d2], {value};"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r4], [%a0, {{%r30, {y}}}], [%r5];\n"
)
BOX_BYTES = 8 * 8 * 4


def load_by_all_lanes(device: Device) -> str:
    """Return the number of copies that the barrier counts when 32 lanes issue a tensor load."""
    source = torch.arange(64 * 8, dtype=torch.int32, device=device.torch_device).view(64, 8)
    seen = []
    for copies in (1, 32):
        body = (
            SETUP
            + f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %d0, [%r5], {BOX_BYTES * copies}; bar.sync 0;\n"
            + LOAD.format(y="%r30")
            + POLL
            + "nanosleep.u32 1000000;\n"  # copies beyond the expected ones land before the CTA exits
            + STORE_RESULT.format(value="%r9")
        )
        out = torch.full((32,), -1, dtype=torch.int32, device=device.torch_device)
        text = module_text(ARCH, entry("k", "map u64", body), shared=True)
        given = device.tensor_map(INT32, source, [8, 8])
        try:
            device.launch(text, 1, 32, 33 << 10, [given, out], [source])
            seen.append(f"bytes of {copies} expected: phase {'completes' if out.min() == 1 else 'does not complete'}")
        except EmulatorError as e:
            seen.append(f"bytes of {copies} expected: {str(e).splitlines()[0][:100]}")
    return "; ".join(seen)


def reduction_by_all_lanes(device: Device) -> str:
    """Return the number of additions when 32 lanes issue a tensor reduction."""
    target = torch.zeros(8, 8, dtype=torch.int32, device=device.torch_device)
    body = (
        "mov.u32 %r4, smem; shl.b32 %r6, %thread, 3; add.u32 %r6, %r4, %r6; mov.u32 %r30, 0; mov.u32 %r31, 1;\n"
        "st.shared.v2.b32 [%r6], {%r31, %r31}; fence.proxy.async.shared::cta; bar.sync 0;\n"
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%a0, {%r30, %r30}], [%r4];\n"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    text = module_text(ARCH, entry("k", "map", body), shared=True)
    device.launch(text, 1, 32, 1 << 10, [device.tensor_map(INT32, target, [8, 8])], [target])
    return f"every element becomes {sorted(set(target.flatten().tolist()))}"


def exit_with_a_store_in_flight(device: Device) -> str:
    """Count wrong words when CTAs exit with a bulk store in flight and successors reuse their shared memory."""
    ctas, words = 4096, 8192
    out = torch.full((ctas, words), -1, dtype=torch.int32, device=device.torch_device)
    if isinstance(device, Emulated):
        ctas = 8
    body = (
        "mov.u32 %r4, smem; shl.b32 %r6, %thread, 2;\n"
        f"FILL: setp.ge.u32 %p1, %r6, {4 * words}; @%p1 bra FILLED; add.u32 %r7, %r4, %r6;\n"
        "st.shared.b32 [%r7], %block; add.u32 %r6, %r6, 512; bra FILL;\n"
        "FILLED: fence.proxy.async.shared::cta; bar.sync 0;\n"
        f"setp.eq.u32 %p0, %thread, 0; mul.wide.u32 %d1, %block, {4 * words}; add.u64 %d1, %a0, %d1;\n"
        f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r4], {4 * words};\n"
        "@%p0 cp.async.bulk.commit_group;"
    )
    text = module_text(ARCH, entry("k", "u64", body), shared=True)
    device.launch(text, ctas, 128, 4 * words, [out])
    wanted = torch.arange(ctas, dtype=torch.int32, device=out.device).view(-1, 1)
    return f"{int((out[:ctas] != wanted).sum())} of {ctas * words} words are wrong"


def nan_fill(device: Device) -> str:
    """Return the fill value of elements outside a tensor, and the descriptor bit that selects it."""
    found = []
    for kind, dtype in ((FLOAT32, torch.float32), (FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)):
        source = torch.ones(8, 32 // dtype.itemsize, dtype=dtype, device=device.torch_device)
        box = [32 // dtype.itemsize, 8]
        plain, filled = (device.tensor_map(kind, source, box, nan_fill=fill) for fill in (False, True))
        bits = [8 * k + b for k in range(128) for b in range(8) if (plain[k] ^ filled[k]) >> b & 1]
        body = (
            SETUP
            + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d0, [%r5], 256; bar.sync 0;\n@%p0 "
            + LOAD.format(y="%r31")
            + POLL
            + "shl.b32 %r6, %thread, 2; add.u32 %r6, %r4, %r6; ld.shared.b32 %r7, [%r6+128];\n"
            + STORE_RESULT.format(value="%r7")
        )
        out = torch.zeros(32, dtype=torch.int32, device=device.torch_device)
        text = module_text(ARCH, entry("k", "map u64", body), shared=True)
        device.launch(text, 1, 32, 33 << 10, [filled, out], [source])
        words = sorted({f"{int(w) & 0xFFFFFFFF:#010x}" for w in out.tolist()})
        found.append(f"{str(dtype).removeprefix('torch.')}: words {words}, descriptor bits {bits}")
    return "; ".join(found)


def descriptors(device: Device) -> str:
    """List the bytes in which the emulator's descriptors differ from the driver's."""
    model, wrong = Emulated(ARCH), []
    kinds = {INT32: torch.int32, FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
    for kind, dtype in kinds.items():
        for shape in ((64, 64), (4, 16, 64), (2, 3, 4, 5, 64)):
            tensor = torch.zeros(shape, dtype=dtype, device=device.torch_device)
            box = [16, *[2] * (len(shape) - 1)]
            theirs, ours = device.tensor_map(kind, tensor, box), model.tensor_map(kind, tensor, box)
            wrong += [f"{dtype} {shape}: byte {k}: {a:#x}, model {b:#x}"
                      for k, (a, b) in enumerate(zip(theirs[:64], ours[:64], strict=True)) if a != b]  # fmt: skip
    return "; ".join(wrong[:12]) or "equal in all fields"


QUESTIONS: dict[str, Callable[[Device], str]] = {
    "tensor load issued by all lanes": load_by_all_lanes,
    "tensor reduction issued by all lanes": reduction_by_all_lanes,
    "CTA exit with a bulk store in flight": exit_with_a_store_in_flight,
    "NaN fill outside of the tensor": nan_fill,
    "descriptor bytes": descriptors,
}


def ask(devices: list[Device], say: Say) -> list[dict[str, str]]:
    say("\n| question | " + " | ".join(d.name for d in devices) + " |\n| --- |" + " --- |" * len(devices))
    rows = []
    for name, question in QUESTIONS.items():
        row = {"question": name}
        for device in devices:
            try:
                row[device.name] = question(device)
            except (EmulatorError, RuntimeError) as e:
                row[device.name] = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
        rows.append(row)
        say("| " + " | ".join(row.values()) + " |")
    return rows


def run_comparison(folder: Path, count: int = 1 << 19, tiles: int = 256, model_only: bool = False) -> dict[str, Any]:
    """Compare on this machine's GPU, print tables and keep them in ``folder`` as hardware.md and hardware.json.

    Args:
        folder: where results go.
        count: inputs of each instruction, a multiple of 1024.
        tiles: tiles of each matrix product.
        model_only: run the emulator alone, to try the kernels on a machine without a GPU.
    """
    started = time.perf_counter()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    model = Emulated(ARCH)
    devices: list[Device] = [model] if model_only else [Gpu(), model]
    found = {
        "device": devices[0].name,
        "instructions": compare_instructions(devices, count, say),
        "products": compare_products(devices, tiles, say),
        "questions": ask(devices, say),
        "seconds": 0.0,
    }
    found["seconds"] = round(time.perf_counter() - started, 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hardware.md").write_text(f"{devices[0].name}\n\n" + "\n".join(lines) + "\n")
    (folder / "hardware.json").write_text(json.dumps(found, indent=1, default=str))
    return found
