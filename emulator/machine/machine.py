"""A launch in progress: native state, asynchronous work, and the loop that chooses the next step."""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..decode.program import Program
from ..diagnosis import deadlock, faults
from ..diagnosis.report import LaunchReport
from ..errors import Deadlock, EmulatorError
from ..native import core
from ..native.layout import (
    FLAG_BANKS,
    FLAG_CAREFUL,
    FLAG_PROXY,
    FLAG_RACE,
    FLAG_STRICT,
    FLAG_SYNC,
    FLAG_UNINIT_GLOBAL,
    MAX_HAZARDS,
    RUN_ERROR,
    RUN_EVENT,
    RUN_EXITED,
    RUN_SCOREBOARD,
    WAIT_NO,
    WAIT_PYTHON,
    HazardState,
    MachineState,
)
from ..options import NUMERICS, SCHEDULES, Options
from . import workers
from .launch import Launch
from .memory import GlobalMemory
from .state import BLOCK, Cluster, Warp

MBARRIER_AGENTS = 64  # per CTA, in the race detector's clocks
STREAMS = 9  # per warp: lanes together, a lane alone, and asynchronous streams
LATEST = 200_000  # instructions before late work completes even if warps progress: they may poll and write meanwhile
PATIENCE = 100_000_000  # instructions without any effect before polling warps count as hung
TIMEOUTS = 8  # rounds of expired try_waits before the state counts as final


@dataclass
class Event:
    """Pending work of an asynchronous engine."""

    run: Callable[[], None]
    key: Any
    what: str
    cluster: Cluster
    pc: int


class Machine:
    """Runs one launch. Engines use :meth:`post`, :meth:`defers`, :meth:`block` and :meth:`check`."""

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory, options: Options):
        self.program, self.launch, self.memory, self.options = program, launch, memory, options
        self.kernel = program.kernel
        self.core = core()
        self.rng = random.Random(options.seed)
        self.queues: dict[Any, deque[Event]] = {}
        self.priorities: dict[Any, float] = {}
        self.active: list[Cluster] = []
        self.warnings: dict[str, int] = {}
        self.totals: dict[str, int] = {}  # counted by engines: bytes copied, matrix operations
        self.events_issued = 0
        self.other_hazards: list[str] = []  # found by engines and other processes
        self.agent_names: dict[tuple[int, int], str] = {}  # (cluster, agent) in a hazard
        gx, gy, gz = launch.grid
        cx, cy, cz = launch.cluster
        self.pending = deque((x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx))
        self.n_clusters = len(self.pending)
        self.next_index = 0
        self.tracked = options.race or options.proxy
        self.workers: workers.Workers | None = None
        self.processes = 1
        self._native_state()

    def _native_state(self) -> None:
        p, o, launch = self.program, self.options, self.launch
        n = len(p.insns)
        self.param_bytes = p.pack_params(launch.params)
        self.template = p.template(self.param_bytes)
        self.param_array = np.frombuffer(self.param_bytes, np.uint8)
        self.count, self.lanes = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        self.bank_ideal, self.bank_passes = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        self.blocked = np.zeros(n, np.uint8)
        self.hazards = (HazardState * MAX_HAZARDS)()
        s = self.state = MachineState()
        s.insns, s.lists, s.refs = p.pointer("insns"), p.pointer("words"), p.pointer("refs")
        s.template_file, s.specials = self.template.ctypes.data, p.pointer("specials")
        s.param, s.param_bytes = self.param_array.ctypes.data, len(self.param_bytes)
        s.count, s.lanes = self.count.ctypes.data, self.lanes.ctypes.data
        s.bank_ideal, s.bank_passes = self.bank_ideal.ctypes.data, self.bank_passes.ctypes.data
        s.blocked, s.hazards = self.blocked.ctypes.data, ctypes.addressof(self.hazards)
        s.regions, s.n_regions = ctypes.addressof(self.memory.table), len(self.memory.regions)
        s.file_bytes, s.n_insns, s.n_preds = p.file_bytes, n, p.file.predicates
        s.n_slots, s.n_specials, s.local_bytes = p.file_bytes // 64, p.n_specials, p.kernel.local_bytes
        s.grid[:], s.block[:], s.cluster_dim[:] = launch.grid, launch.block, launch.cluster
        s.smem_bytes, s.static_smem = self.dynamic_smem(), p.kernel.static_smem
        s.numerics = NUMERICS.index(o.numerics)
        s.schedule, s.seed = SCHEDULES.index(o.schedule), o.seed
        self.maps = np.zeros(len(self.param_bytes) // 64 + 1, np.uint64)
        s.maps = self.maps.ctypes.data
        s.rng = o.seed * 0x9E3779B97F4A7C15 % 2**64 | 1
        s.spurious = int(0.2 * 2**32) if o.schedule in ("random", "priority") else 0
        if self.tracked:
            warps, ctas = -(-launch.threads // 32), prod(launch.cluster)
            s.cap = -(-(ctas * (warps * STREAMS + MBARRIER_AGENTS) + 8) // 8) * 8
        s.flags = (
            (FLAG_RACE if o.race else 0)
            | (FLAG_PROXY if o.proxy else 0)
            | (FLAG_SYNC if o.sync else 0)
            | (FLAG_STRICT | FLAG_UNINIT_GLOBAL if o.strict else 0)
            | (FLAG_CAREFUL if o.strict or self.tracked else 0)
            | (FLAG_BANKS if o.banks else 0)
        )
        self.address = ctypes.addressof(s)

    def dynamic_smem(self) -> int:
        """Return the dynamic bytes, plus the padding that aligns them behind the static part."""
        align = max([16, *self.kernel.dynamic.values()])
        start = 1024 + self.kernel.static_smem
        return self.launch.smem + (-start % align)

    # ------------------------------------------------------------------ services for engines
    def check(self, status: int) -> None:
        """Raise the fault that a native function recorded."""
        if status:
            raise faults.fault(self)

    def post(self, run: Callable[[], None], key: Any, what: str, cluster: Cluster, pc: int) -> None:
        """Schedule ``run`` for later, or call it now in eager schedules. Work with equal keys stays in order."""
        self.events_issued += 1
        if self.options.schedule == "eager" and key not in self.queues:
            run()
            return
        self.queues.setdefault(key, deque()).append(Event(run, key, what, cluster, pc))

    def defers(self, pc: int) -> bool:
        """Whether to defer work that may complete at its wait instruction (wgmma, tcgen05.ld)."""
        schedule = self.options.schedule
        if schedule == "random":
            return self.rng.random() >= 0.3
        if schedule == "priority":
            return self.priority(("defer", pc)) >= 0.5
        return schedule == "late"

    def priority(self, key: Any) -> float:
        p = self.priorities.get(key)
        if p is None:
            p = self.priorities[key] = self.rng.random()
        return p

    def block(self, w: Warp, frag: int, ready: Callable[[], bool], why: str) -> object:
        """Make a fragment wait until ``ready``, then execute its instruction again."""
        f = w.state.frags[frag]
        f.wait = WAIT_PYTHON
        w.waits[f.pc] = (ready, why)
        self.blocked[f.pc] = 1
        return BLOCK

    def progress(self) -> None:
        self.state.progress += 1

    def warn(self, text: str) -> None:
        self.warnings[text] = self.warnings.get(text, 0) + 1

    def add(self, what: str, n: int) -> None:
        self.totals[what] = self.totals.get(what, 0) + n

    def where(self, pc: int) -> str:
        return self.kernel.where(pc)

    # ------------------------------------------------------------------ asynchronous work
    def fire(self, key: Any) -> None:
        queue = self.queues[key]
        event = queue.popleft()
        if not queue:
            del self.queues[key]
        event.run()
        self.progress()

    def fire_one(self) -> bool:
        if not self.queues:
            return False
        keys = list(self.queues)
        if self.options.schedule == "random":
            key = self.rng.choice(keys)
        elif self.options.schedule == "priority":
            key = max(keys, key=lambda k: self.priority(("event", self.queues[k][0].pc)))
        else:
            key = keys[-1]  # newest first, so old work waits for as long as possible
        self.fire(key)
        return True

    def drain(self, cluster: Cluster) -> None:
        """Complete the work that a cluster left in flight at its exit."""
        for key in [k for k, q in self.queues.items() if q[0].cluster is cluster]:
            while key in self.queues:
                self.fire(key)

    # ------------------------------------------------------------------ warps
    def run_warp(self, w: Warp, budget: int) -> None:
        state, handlers = self.state, self.program.handlers
        run, advance, machine, address = self.core.core_run, self.core.core_advance, self.address, w.address
        stop = state.instructions + budget
        while True:
            status = run(machine, address, budget)
            if status == RUN_EVENT:
                frag, mask = state.ev_frag, state.ev_mask
                answer = handlers[state.ev_pc](self, w, frag, mask)
                if answer is None:
                    advance(machine, address, frag, mask)
                if state.instructions < stop:
                    continue
            elif status == RUN_SCOREBOARD:
                from ..engines.tensor_memory import touched_early

                touched_early(self, w)
                continue
            elif status == RUN_ERROR:
                raise faults.fault(self)
            elif status == RUN_EXITED:
                self.warp_exited(w)
            return

    def warp_exited(self, w: Warp) -> None:
        from ..engines import at_warp_exit

        at_warp_exit(self, w)

    def python_ready(self, w: Warp) -> bool:
        """Wake fragments whose Python condition has become true."""
        woken = False
        for k in range(w.state.n_frags):
            f = w.state.frags[k]
            if f.wait == WAIT_PYTHON:
                waiting = w.waits.get(f.pc)
                if waiting is None or waiting[0]():
                    f.wait = WAIT_NO
                    w.waits.pop(f.pc, None)
                    woken = True
        return woken

    def runnable(self) -> list[Warp]:
        out = []
        poll = self.core.core_poll
        for cluster in self.active:
            for cta in cluster.ctas:
                if not poll(cta.address, cta.poll.ctypes.data):
                    continue
                for k, flag in enumerate(cta.poll.tolist()):
                    if flag == 1 or (flag == 2 and self.python_ready(cta.warps[k])):
                        out.append(cta.warps[k])
        return out

    # ------------------------------------------------------------------ clusters
    def admit(self) -> None:
        origin = self.pending.popleft()
        cluster = Cluster(self.address, origin, self.next_index, self.program)
        self.next_index += 1
        if self.options.strict:
            slots = self.program.constant_slots()
            for cta in cluster.ctas:
                for w in cta.warps:
                    w.written[slots] = 0xFFFFFFFF
        self.active.append(cluster)

    def finish(self, cluster: Cluster) -> None:
        from ..engines import at_cluster_end

        self.drain(cluster)
        at_cluster_end(self, cluster)
        self.name_hazards([cluster])
        cluster.free()

    def name_hazards(self, clusters: list[Cluster]) -> None:
        """Keep agents' names that hazards mention, because names end with their cluster."""
        for k in range(self.state.n_hazards):
            faults.remember_agents(self, self.hazards[k], clusters)

    def hazard_texts(self) -> list[str]:
        self.name_hazards(self.active)
        texts = [faults.hazard_text(self, self.hazards[k]) for k in range(self.state.n_hazards)]
        return [*texts, *self.other_hazards]

    # ------------------------------------------------------------------ the loop
    def run(self) -> LaunchReport:
        started = time.perf_counter()
        self.core.core_machine_open(self.address, self.n_clusters)
        try:
            self.loop(started)
            if self.workers:
                self.workers.collect()
        except EmulatorError as e:
            e.args = (f"{e}\n(kernel {self.kernel.name[:80]}; replay: {self.options.describe()})",)
            raise
        finally:
            if self.workers:
                self.workers.abandon()
            report = LaunchReport.of(self, time.perf_counter() - started)
            for cluster in self.active:
                cluster.free()
            self.active = []
            self.queues.clear()
            self.memory.free()
            self.core.core_machine_close(self.address)
        return report

    def loop(self, started: float | None = None) -> None:
        """Run clusters until none is left. With a start time, share clusters of a long launch with other processes."""
        resident, idle = self.options.resident, 0
        helpers = workers.allowed(self) if started is not None else 1
        split = (started or 0.0) + workers.SERIAL_SECONDS
        last_progress = last_fired = 0
        while self.active or self.pending:
            if helpers > 1 and len(self.pending) >= helpers and time.perf_counter() > split:
                self.workers = workers.Workers(self, helpers)
                helpers = 1
            while self.pending and len(self.active) < resident:
                self.admit()
            before = self.state.progress
            ran = self.round()
            for cluster in [c for c in self.active if not c.live]:
                self.active.remove(cluster)
                self.finish(cluster)
                ran = True
            if self.state.instructions > self.options.max_instructions:
                raise Deadlock("instruction budget exhausted\n" + deadlock.dump(self))
            if self.state.progress != before:
                idle, last_progress = 0, self.state.instructions
                if last_progress - last_fired > LATEST:
                    self.fire_one()
                    last_fired = last_progress
                continue
            # Nothing changed: the warps wait, or they poll for an action of another warp or engine.
            if self.fire_one():
                last_fired = self.state.instructions
                continue
            if self.pending:
                resident += 1
                continue
            if ran:
                if self.state.instructions - last_progress > PATIENCE:
                    raise Deadlock("warps poll memory that no warp changes\n" + deadlock.dump(self))
                if self.rng.random() < 0.05:
                    self.priorities.clear()  # or long-polling warps would stay behind warps that poll now
                continue
            if not ran and idle < TIMEOUTS and self.timeout_round():
                idle += 1
                continue
            raise Deadlock("no warp can make progress\n" + deadlock.dump(self))

    def round(self) -> bool:
        """Run every runnable warp for one time slice; return whether any ran."""
        schedule = self.options.schedule
        warps = self.runnable()
        if schedule == "priority":
            return self.priority_round(warps)
        if schedule == "random":
            self.rng.shuffle(warps)
            for w in warps:
                self.run_warp(w, self.rng.choice((3, 20, 100, 1000)))
                while self.queues and self.rng.random() < 0.3:
                    self.fire_one()
            return bool(warps)
        for w in warps:
            self.run_warp(w, 4000)
        return bool(warps)

    def priority_round(self, warps: list[Warp]) -> bool:
        """Run the warp or event of highest priority, and demote it now and then.

        After Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010.
        """
        key_of = {id(w): ("warp", w.cta.id, w.id) for w in warps}
        best = max(warps, key=lambda w: self.priority(key_of[id(w)]), default=None)
        if self.queues:
            event = max(self.queues, key=lambda k: self.priority(("event", self.queues[k][0].pc)))
            p = self.priority(("event", self.queues[event][0].pc))
            if best is None or p >= self.priority(key_of[id(best)]):
                if self.rng.random() < 0.02:
                    self.priorities["event", self.queues[event][0].pc] = self.rng.random() * 0.2
                self.fire(event)
                return True
        if best is None:
            return False
        if self.rng.random() < 0.05:
            self.priorities[key_of[id(best)]] = self.rng.random()
        self.run_warp(best, self.rng.choice((20, 200, 1000)))
        return True

    # ------------------------------------------------------------------ several processes
    def become_worker(self, pending: deque, number: int) -> None:
        """Start on these clusters with all counts at zero, in a forked child; the parent keeps its own clusters."""
        self.active, self.pending, self.workers = [], pending, None
        self.queues.clear()
        for counts in (self.count, self.lanes, self.bank_ideal, self.bank_passes, self.blocked):
            counts[...] = 0
        self.totals, self.warnings = {}, {}
        self.state.n_hazards = 0
        self.state.instructions = self.state.matrix_flops = self.state.tma_load_bytes = 0
        self.next_index = self.n_clusters * number

    def tally(self) -> dict[str, Any]:
        return {
            "arrays": [self.count, self.lanes, self.bank_ideal, self.bank_passes],
            "blocked": self.blocked,
            "totals": self.totals,
            "warnings": self.warnings,
            "hazards": self.hazard_texts(),
            "scalars": (self.state.instructions, self.state.matrix_flops, self.state.tma_load_bytes),
        }

    def add_tally(self, other: dict[str, Any]) -> None:
        arrays = (self.count, self.lanes, self.bank_ideal, self.bank_passes)
        for mine, theirs in zip(arrays, other["arrays"], strict=True):
            mine += theirs
        self.blocked |= other["blocked"]
        for counts, more in ((self.totals, other["totals"]), (self.warnings, other["warnings"])):
            for key, n in more.items():
                counts[key] = counts.get(key, 0) + n
        self.other_hazards += other["hazards"]
        s = self.state
        instructions, flops, load = other["scalars"]
        s.instructions, s.matrix_flops, s.tma_load_bytes = (
            s.instructions + instructions,
            s.matrix_flops + flops,
            s.tma_load_bytes + load,
        )
        self.processes += 1

    def timeout_round(self) -> bool:
        expired = [self.core.core_timeout(cta.address) for cluster in self.active for cta in cluster.ctas]
        return any(expired)
