"""Python's mirror of the structures in core.h, compared at load with the library's own layout."""

from __future__ import annotations

import ctypes

SMEM_BASE = 1024
RANK_SHIFT = 24
OFFSET_MASK = 0xFFFFFF
WINDOW_SHIFT = 56
NONE = 0xFFFFFFFF
FULL = 0xFFFFFFFF
MAX_HAZARDS = 256

KIND_LANE, KIND_BRANCH, KIND_EXIT, KIND_SYSTEM, KIND_PYTHON, KIND_NOP = range(6)
ROW_NONE, ROW_16, ROW_32, ROW_64, ROW_128, ROW_PRED = range(6)
SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED, SPACE_LOCAL, SPACE_PARAM = range(5)
AUX_MOVE = 1
AUX_ADDR64, AUX_SIGNED, AUX_ACQUIRE, AUX_RELEASE, AUX_STRONG = 1, 2, 4, 8, 16
WAIT_NO, WAIT_WORD, WAIT_TRY, WAIT_CONVERGE, WAIT_PYTHON = range(5)
BUSY_NO, BUSY_WRITTEN, BUSY_READ, BUSY_LOAD = range(4)
RUN_BUDGET, RUN_BLOCKED, RUN_EVENT, RUN_EXITED, RUN_ERROR, RUN_SCOREBOARD, RUN_SETTLE = range(7)
FLAG_RACE, FLAG_PROXY, FLAG_STRICT, FLAG_BANKS, FLAG_UNINIT_GLOBAL, FLAG_CAREFUL, FLAG_SYNC = 1, 2, 4, 8, 16, 32, 64
REGION_READONLY, REGION_TRACK, REGION_FRESH = 1, 2, 4
TOUCH_READ, TOUCH_WRITE, TOUCH_CHECK, TOUCH_ASYNC, TOUCH_LANE, TOUCH_STRONG = 0, 1, 2, 4, 8, 16
# Parts of a vector clock; barriers hand on the first three.
CLOCK_KNOWN, CLOCK_PROXY, CLOCK_SENT, CLOCK_WARP, CLOCK_LANE, WARP_PARTS = range(6)
SHARED_PARTS = CLOCK_WARP
TMEM_SENT = 2  # in a hazard: a fence::before_thread_sync is behind the earlier access
HAZARD_RACE, HAZARD_PROXY, HAZARD_GLOBAL, HAZARD_BARRIER, HAZARD_SITE, HAZARD_TENSOR_FENCE, HAZARD_EXIT = range(7)

P, U8, U16, U32, U64, I16, I32, I64 = (
    ctypes.c_void_p,
    ctypes.c_uint8,
    ctypes.c_uint16,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int16,
    ctypes.c_int32,
    ctypes.c_int64,
)


class Insn(ctypes.Structure):
    _fields_ = [
        ("fn", P),
        ("o", U32 * 6),
        ("imm", I64),
        ("list", U32),
        ("refs", U32),
        ("n_list", U16),
        ("n_use", U16),
        ("n_def", U16),
        ("guard", I16),
        ("target", I32),
        ("kind", U8),
        ("guard_not", U8),
        ("pad", U8 * 2),
        ("space", U8),
        ("size", U8),
        ("vec", U8),
        ("aux", U8),
    ]


class Frag(ctypes.Structure):
    _fields_ = [
        ("pc", I32),
        ("mask", U32),
        ("wait", U32),
        ("state", U32),
        ("word", P),
        ("old", U32),
        ("want", U32),
        ("info", I32 * 2),
    ]


class WarpState(ctypes.Structure):
    _fields_ = [
        ("file", P),
        ("pred", P),
        ("written", P),
        ("busy", P),
        ("touched", P),
        ("origin", P),
        ("local", P),
        ("cta", P),
        ("vc", P),
        ("executed", I64),
        ("horizon", P),
        ("fenced", P),
        ("unfenced", P),
        ("arrived_at", P),
        ("id", I32),
        ("threads", I32),
        ("n_frags", I32),
        ("agent", I32),
        ("n_busy", U32),
        ("accessors", U32),
        ("synced", I32),
        ("solo", I32),
        ("solo_lanes", U32),
        ("solo_synced", I32),
        ("actor", I32),
        ("arrived", U32),
        ("arrived_of", U32),
        ("arrived_clock", I32),
        ("arrived_solo", I32),
        ("tensor_loads", I32),
        ("tensor_stores", I32),
        ("fenced_before", U32),
        ("fenced_after", U32),
        ("wgmma_fences", U32),
        ("live", U32),
        ("turn", U32),
        ("cluster_phase", U32),
        ("cluster_arrived", U32),
        ("frags", Frag * 32),
    ]


class MBarrierState(ctypes.Structure):
    _fields_ = [
        ("phase", U32),
        ("count", I32),
        ("pending", I32),
        ("offset", U32),
        ("tx", I64),
        ("vc", P),
        ("agent", I32),
        ("alive", U32),
        ("tx_phase", U32),
        ("seen_phase", U32),
        ("horizon", U32),
    ]


class NamedBarrierState(ctypes.Structure):
    _fields_ = [
        ("generation", U32),
        ("arrived", I32),
        ("expected", I32),
        ("whole", I32),
        ("reduce_popc", U32),
        ("reduce_and", U32),
        ("reduce_or", U32),
        ("result_popc", U32),
        ("result_and", U32),
        ("result_or", U32),
        ("warps", U32),
        ("site", I32),
        ("horizon", U32),
        ("vc", P),
    ]


class CtaState(ctypes.Structure):
    _fields_ = [
        ("smem", P),
        ("init", P),
        ("mbar_slot", P),
        ("cluster", P),
        ("warps", P),
        ("shadow", P),
        ("tmem_shadow", P),
        ("incoming", P),
        ("mbars", P),
        ("groups", P),
        ("smem_size", U32),
        ("rank", U32),
        ("n_warps", I32),
        ("n_mbars", I32),
        ("id", U32 * 3),
        ("exited", U32),
        ("live_warps", I32),
        ("pad", I32),
        ("bars", NamedBarrierState * 16),
    ]


class ClusterState(ctypes.Structure):
    _fields_ = [
        ("ctas", P * 16),
        ("vc", P),
        ("n_ctas", U32),
        ("phase", U32),
        ("arrived", I32),
        ("n_warps", I32),
        ("live_warps", I32),
        ("index", I32),
        ("origin", U32 * 3),
        ("n_agents", I32),
    ]


class RegionState(ctypes.Structure):
    _fields_ = [
        ("base", U64),
        ("size", U64),
        ("host", P),
        ("written", P),
        ("stores", U64),
        ("flags", U32),
        ("id", U32),
        ("shadow", P),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        ("code", I32),
        ("pc", I32),
        ("warp", I32),
        ("lane", I32),
        ("address", U64),
        ("extra", U64),
        ("extra2", U64),
        ("cta", I32 * 3),
        ("rank", I32),
    ]


class HazardState(ctypes.Structure):
    _fields_ = [
        ("kind", I32),
        ("write", I32),
        ("other_write", I32),
        ("pc", I32),
        ("other_pc", I32),
        ("agent", I32),
        ("other_agent", I32),
        ("tmem", I32),
        ("rank", I32),
        ("cluster", I32),
        ("cell", U64),
        ("count", U64),
    ]


class SpecialRow(ctypes.Structure):
    _fields_ = [("kind", U32), ("offset", U32)]


class MachineState(ctypes.Structure):
    _fields_ = [
        ("insns", P),
        ("lists", P),
        ("refs", P),
        ("template_file", P),
        ("specials", P),
        ("param", P),
        ("count", P),
        ("bank_ideal", P),
        ("bank_passes", P),
        ("lanes", P),
        ("blocked", P),
        ("regions", P),
        ("hazards", P),
        ("file_bytes", U64),
        ("rng", U64),
        ("instructions", I64),
        ("progress", I64),
        ("n_insns", I32),
        ("n_preds", I32),
        ("n_slots", I32),
        ("n_specials", I32),
        ("n_regions", I32),
        ("n_hazards", I32),
        ("cap", I32),
        ("last_region", I32),
        ("param_bytes", I32),
        ("local_bytes", I32),
        ("flags", U32),
        ("spurious", U32),
        ("grid", U32 * 3),
        ("block", U32 * 3),
        ("cluster_dim", U32 * 3),
        ("smem_bytes", U32),
        ("static_smem", U32),
        ("schedule", U32),
        ("numerics", U32),
        ("seed", U64),
        ("matrix_flops", U64),
        ("tma_load_bytes", U64),
        ("maps", P),
        ("world", P),
        ("scratch", P),
        ("ev_pc", I32),
        ("ev_frag", I32),
        ("ev_mask", U32),
        ("pad2", U32),
        ("err", Fault),
    ]


class TensorMapState(ctypes.Structure):
    """``tensor_map`` of tma.c."""

    _fields_ = [
        ("address", U64),
        ("stride", U64 * 5),
        ("dim", U32 * 5),
        ("box", U32 * 5),
        ("step", U32 * 5),
        ("rank", U32),
        ("swizzle", U32),
        ("fill", U32),
        ("type", U32),
        ("units", U32),
        ("unit_bytes", U32),
        ("expand", U32),
    ]


def expected_layout() -> list[int]:
    """Return the numbers that core_layout() must return."""
    return [
        ctypes.sizeof(Insn),
        Insn.imm.offset,
        Insn.list.offset,
        Insn.target.offset,
        Insn.space.offset,
        ctypes.sizeof(Frag),
        Frag.word.offset,
        Frag.info.offset,
        ctypes.sizeof(WarpState),
        WarpState.vc.offset,
        WarpState.id.offset,
        WarpState.frags.offset,
        ctypes.sizeof(MBarrierState),
        MBarrierState.vc.offset,
        MBarrierState.seen_phase.offset,
        ctypes.sizeof(NamedBarrierState),
        ctypes.sizeof(CtaState),
        CtaState.smem_size.offset,
        CtaState.bars.offset,
        ctypes.sizeof(ClusterState),
        ClusterState.n_ctas.offset,
        ClusterState.n_agents.offset,
        ctypes.sizeof(RegionState),
        ctypes.sizeof(Fault),
        ctypes.sizeof(HazardState),
        ctypes.sizeof(MachineState),
        MachineState.flags.offset,
        MachineState.err.offset,
    ]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIALS = {
    name: k
    for k, name in enumerate(
        _names(
            "tid.x tid.y tid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z ntid.x ntid.y ntid.z "
            "cluster_ctaid.x cluster_ctaid.y cluster_ctaid.z cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z "
            "clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z cluster_ctarank "
            "cluster_nctarank laneid warpid nwarpid smid nsmid lanemask_eq lanemask_lt lanemask_le lanemask_gt "
            "lanemask_ge dynamic_smem_size total_smem_size shared_address shared_address64 gridid"
        )
    )
}

ERRORS = _names(
    "NONE GLOBAL SHARED MISALIGNED MIXED_SPACE RANK MBAR_INIT MBAR_OVERFLOW MBAR_EXITED BARRIER_COUNT BARRIER_OVERFLOW "
    "SHFL_LANE TRAP UNSUPPORTED READONLY UNINIT_REG UNINIT_SHARED UNINIT_GLOBAL IN_FLIGHT CLUSTER_BARRIER LOCAL "
    "MBAR_COUNT MBAR_MISALIGNED MBAR_MEMORY TX_RANGE AGENTS PARAM BARRIER_ID WGMMA_FENCE WGMMA_GROUP "
    "WGMMA_DISAGREE DESCRIPTOR TMA_EXITED TMA_RANK"
)
