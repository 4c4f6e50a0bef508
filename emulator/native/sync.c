/* Barriers: named barriers, cluster barriers, mbarriers; and the fences that the detectors care about. */
#include <stdlib.h>

#include "lane.h"

#define TRACKED(M) ((M)->flags & (FLAG_RACE | FLAG_PROXY))

static int all_lanes(warp *w, frag *f) {
  if (!(w->live & ~f->mask)) return 1;
  f->wait = WAIT_CONVERGE;
  f->want = FULL;
  return 0;
}

/* ------------------------------------------------------------------ named barriers */
/* A clock buffer holds what arrivals brought and what the last completed generation released, SHARED_PARTS each. */
static i32 *released(machine *M, i32 *vc) { return clock_part(M, vc, SHARED_PARTS); }
static void clock_turn(machine *M, i32 *vc) {
  size_t bytes = SHARED_PARTS * (size_t)M->cap * sizeof *vc;
  memcpy(released(M, vc), vc, bytes);
  memset(vc, 0, bytes);
}

/* PTX ISA, "specialized inter-thread synchronization for tcgen05 instructions": the standard mechanisms of the memory
 * model apply to tcgen05 instructions too. An arrival with release and a wait with acquire therefore order completed
 * accesses without tcgen05.fence. NVIDIA's examples rely on that. Strict mode asks for the fences of the canonical
 * patterns. */
static void release_tensor(machine *M, warp *w, int is_relaxed) {
  if (!is_relaxed && !(M->flags & FLAG_STRICT)) tensor_fence_before(M, w);
}
static void acquire_tensor(machine *M, warp *w, int is_relaxed) {
  if (!is_relaxed && !(M->flags & FLAG_STRICT)) tensor_fence_after(M, w);
}

/* PTX ISA, "bar": without a thread count all threads of the CTA take part; hardware counts exited warps as arrived. */
void barrier_settle(machine *M, cta *c, named_barrier *b) {
  int gone = 0;
  if (b->whole) for (int k = 0; k < c->n_warps; k++) gone += c->warps[k].live ? 0 : LANES;
  if (!b->arrived || b->arrived + gone < b->expected) return;
  b->arrived = 0;
  b->generation++;
  b->warps = 0;
  b->site = 0;
  b->result_popc = b->reduce_popc, b->result_and = b->reduce_and, b->result_or = b->reduce_or;
  if (TRACKED(M)) clock_turn(M, b->vc);
}

static void leave_barrier(machine *M, warp *w, named_barrier *b) {
  if (TRACKED(M)) {
    clock_acquire(M, w, released(M, b->vc));
    acquire_tensor(M, w, 0);
  }
  if (M->flags & FLAG_RACE) horizon_adopt(M, w, b->horizon);
}

/* bar.sync / bar.arrive / bar.red.
 *     o[0]  destination of red    o[1]  barrier number    o[2]  thread count or none    o[3]  predicate of red
 *     aux   0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or    imm   bit 0: negated predicate, bit 1: aligned */
static void reduce_result(warp *w, const insn *i, named_barrier *b, u32 m) {
  if (i->aux < 2) return;
  if (i->aux == 2) {
    u32 *d = WROW(u32, i->o[0]);
    for (int l = 0; l < LANES; l++) d[l] = m >> l & 1 ? b->result_popc : d[l];
    return;
  }
  u32 v = (i->aux == 3 ? b->result_and : b->result_or) ? FULL : 0;
  w->pred[i->o[0]] = (w->pred[i->o[0]] & ~m) | (v & m);
}

/* PTX ISA, "barrier": .aligned, which bar implies, promises that all threads of a warp execute the same barrier. Warps
 * may wait at different instructions, and arrivals may be mixed in. compute-sanitizer's synccheck reports such a
 * meeting. */
static void check_site(machine *M, warp *w, named_barrier *b, const insn *i, u32 id) {
  i32 here = (i32)(i - M->insns) + 1;
  if (i->aux == 1) return;
  if (!b->site) b->site = here;
  const insn *first = M->insns + b->site - 1;
  if (b->site != here && ((i->imm | first->imm) & 2) && M->flags & FLAG_SYNC)
    hazard_report(M, (hazard){.kind = HAZARD_SITE, .pc = here - 1, .other_pc = b->site - 1, .agent = w->id,
                              .rank = (i32)w->cta->rank, .cluster = w->cta->cluster->index, .cell = id});
}

EXPORT int sys_bar(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  cta *c = w->cta;
  if (!all_lanes(w, f)) return SYS_BLOCK;
  clock_sync_lanes(M, w);
  u32 id = WROW(u32, i->o[1])[first_lane(m)];
  if (id > 15) return fail(M, w, i, ERR_BARRIER_ID, -1, id, 0);
  named_barrier *b = &c->bars[id];
  if (f->state) { /* woken: the generation we arrived in is complete */
    f->state = 0;
    leave_barrier(M, w, b);
    reduce_result(w, i, b, m);
    return SYS_NEXT;
  }
  int whole = i->o[2] == NONE;
  int n = whole ? LANES * c->n_warps : (int)WROW(u32, i->o[2])[first_lane(m)];
  if (n % LANES || n <= 0) return fail(M, w, i, ERR_BARRIER_COUNT, -1, id, (u64)n);
  if (b->arrived && b->expected != n) {
    M->err.extra2 = (u64)b->expected;
    return fail(M, w, i, ERR_BARRIER_COUNT, -1, id, (u64)n);
  }
  check_site(M, w, b, i, id);
  if (!b->arrived) b->reduce_popc = 0, b->reduce_and = 1, b->reduce_or = 0;
  b->whole = whole;
  b->expected = n;
  if (i->aux >= 2) {
    u32 p = (i->imm & 1 ? ~w->pred[i->o[3]] : w->pred[i->o[3]]) & m;
    b->reduce_popc += (u32)__builtin_popcount(p);
    b->reduce_and &= p == m;
    b->reduce_or |= p != 0;
  }
  b->arrived += LANES;
  /* No program counts one warp twice, but a warp that skips a wait of its own does. Its second arrival takes the place
   * of another warp's. */
  if (M->flags & FLAG_RACE && b->warps >> w->id & 1)
    hazard_report(M, (hazard){.kind = HAZARD_BARRIER, .pc = (i32)(i - M->insns), .other_pc = -1, .agent = w->agent,
                              .rank = (i32)c->rank, .cluster = c->cluster->index, .cell = id});
  b->warps |= 1u << w->id;
  if (b->arrived > n) return fail(M, w, i, ERR_BARRIER_OVERFLOW, -1, id, (u64)b->arrived);
  if (TRACKED(M)) {
    release_tensor(M, w, 0);
    clock_release(M, w, b->vc);
  }
  if (M->flags & FLAG_RACE) horizon_publish(M, w, &b->horizon, FULL);
  M->progress++;
  u32 generation = b->generation;
  barrier_settle(M, c, b);
  if (i->aux == 1) return SYS_NEXT;
  if (b->generation != generation) {
    leave_barrier(M, w, b);
    reduce_result(w, i, b, m);
    return SYS_NEXT;
  }
  M->blocked[i - M->insns] = 1;
  f->state = 1;
  f->wait = WAIT_WORD;
  f->word = &b->generation;
  f->old = generation;
  f->info[0] = (i32)id;
  return SYS_BLOCK;
}

/* ------------------------------------------------------------------ cluster barrier */
void cluster_settle(machine *M, cluster *k) {
  int gone = 0;
  for (u32 r = 0; r < k->n_ctas; r++)
    for (int j = 0; j < k->ctas[r]->n_warps; j++) gone += !k->ctas[r]->warps[j].live;
  if (!k->arrived || k->arrived + gone < k->n_warps) return;
  k->arrived = 0;
  k->phase++;
  if (TRACKED(M)) clock_turn(M, k->vc);
}

EXPORT int sys_cluster_arrive(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  cluster *k = w->cta->cluster;
  if (!all_lanes(w, f)) return SYS_BLOCK;
  clock_sync_lanes(M, w);
  if (w->cluster_arrived) return fail(M, w, i, ERR_CLUSTER_BARRIER, -1, 0, 0);
  w->cluster_arrived = 1;
  w->cluster_phase = k->phase;
  if (TRACKED(M)) {
    release_tensor(M, w, i->aux);
    clock_release(M, w, k->vc);
  }
  k->arrived++;
  M->progress++;
  cluster_settle(M, k);
  return SYS_NEXT;
}

EXPORT int sys_cluster_wait(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  cluster *k = w->cta->cluster;
  if (!all_lanes(w, f)) return SYS_BLOCK;
  if (!w->cluster_arrived) return fail(M, w, i, ERR_CLUSTER_BARRIER, -1, 1, 0);
  if (k->phase == w->cluster_phase) {
    M->blocked[i - M->insns] = 1;
    f->wait = WAIT_WORD;
    f->word = &k->phase;
    f->old = k->phase;
    f->info[0] = -1;
    return SYS_BLOCK;
  }
  w->cluster_arrived = 0;
  if (TRACKED(M)) {
    clock_acquire(M, w, released(M, k->vc));
    acquire_tensor(M, w, 0);
  }
  return SYS_NEXT;
}

/* ------------------------------------------------------------------ mbarriers */
/* Phase rule (PTX ISA, "mbarrier: phase of the mbarrier object"): a phase completes when the pending arrivals and the
 * pending transaction count are both zero. The arrival count then starts again. */
void mbar_complete(machine *M, cta *c, mbarrier *b) {
  (void)c;
  if (b->pending || b->tx) return;
  b->phase++;
  b->pending = b->count;
  M->progress++;
  if (TRACKED(M)) {
    clock_join(released(M, b->vc), b->vc, SHARED_PARTS * M->cap);
    released(M, b->vc)[b->agent] = (i32)b->phase;
  }
}

mbarrier *mbar_find(machine *M, warp *w, const insn *i, u32 address, cta **owner) {
  cta *c = shared_cta(M, w, i, address, -1);
  if (!c) return NULL;
  u32 offset = address & OFFSET_MASK;
  *owner = c;
  if (offset & 7) { fail(M, w, i, ERR_MBAR_MISALIGNED, -1, address, 0); return NULL; }
  if (c->exited) { fail(M, w, i, ERR_MBAR_EXITED, -1, address, 0); return NULL; }
  u32 slot = offset + 8 <= c->smem_size ? c->mbar_slot[offset / 8] : 0;
  if (!slot || !c->mbars[slot - 1].alive) { fail(M, w, i, ERR_MBAR_INIT, -1, address, 0); return NULL; }
  return &c->mbars[slot - 1];
}

static int mbar_arrive(machine *M, warp *w, const insn *i, cta *c, mbarrier *b, i64 n, i64 tx) {
  b->tx += tx;
  if (tx) b->tx_phase = b->phase + 1;
  /* PTX ISA, "mbarrier contents": the tx-count ranges over -(2^20 - 1) .. 2^20 - 1. */
  if (b->tx >= 1 << 20 || b->tx <= -(1 << 20)) return fail(M, w, i, ERR_TX_RANGE, -1, b->offset, (u64)b->tx);
  if (b->pending < n) {
    M->err.extra2 = (u64)b->pending;
    return fail(M, w, i, ERR_MBAR_OVERFLOW, -1, (u64)c->rank << RANK_SHIFT | b->offset, (u64)n);
  }
  b->pending -= (i32)n;
  mbar_complete(M, c, b);
  return SYS_NEXT;
}

/* Called by the asynchronous engines. */
EXPORT int core_complete_tx(machine *M, warp *w, i32 pc, u32 address, i64 bytes) {
  cta *c;
  mbarrier *b = mbar_find(M, w, M->insns + pc, address, &c);
  if (!b) return SYS_ERROR;
  b->tx_phase = b->phase + 1;
  b->tx -= bytes;
  if (b->tx <= -(1 << 20)) return fail(M, w, M->insns + pc, ERR_TX_RANGE, -1, address, (u64)b->tx);
  mbar_complete(M, c, b);
  M->progress++;
  return SYS_NEXT;
}
EXPORT int core_arrive(machine *M, warp *w, i32 pc, u32 address, const i32 *vc) {
  cta *c;
  mbarrier *b = mbar_find(M, w, M->insns + pc, address, &c);
  if (!b) return SYS_ERROR;
  if (vc) clock_join(b->vc, vc, SHARED_PARTS * M->cap);
  M->progress++;
  return mbar_arrive(M, w, M->insns + pc, c, b, 1, 0);
}
EXPORT mbarrier *core_mbarrier(machine *M, warp *w, i32 pc, u32 address) {
  cta *c;
  return mbar_find(M, w, M->insns + pc, address, &c);
}

EXPORT int sys_mbar_init(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u32 address = WROW(u32, i->o[1])[l] + (u32)i->imm, count = WROW(u32, i->o[2])[l], offset = address & OFFSET_MASK;
    cta *c = shared_cta(M, w, i, address, l);
    if (!c) return SYS_ERROR;
    if (offset & 7) return fail(M, w, i, ERR_MBAR_MISALIGNED, l, address, 0);
    if (offset < SMEM_BASE || offset + 8 > c->smem_size) return fail(M, w, i, ERR_SHARED, l, address, c->smem_size);
    /* PTX ISA, "mbarrier.init": the count ranges over 1 .. 2^20 - 1. */
    if (!count || count >= 1 << 20) return fail(M, w, i, ERR_MBAR_COUNT, l, address, count);
    u32 slot = c->mbar_slot[offset / 8];
    if (!slot) {
      if (c->n_mbars == MAX_MBARRIERS) return fail(M, w, i, ERR_AGENTS, l, address, 0);
      slot = c->mbar_slot[offset / 8] = (u16)++c->n_mbars;
    }
    mbarrier *b = &c->mbars[slot - 1];
    if (TRACKED(M)) {
      b->alive = 0;
      lanes_access(w, m);
      shadow_lanes(M, w, c, offset, 8, TOUCH_WRITE, l, i);
      if (!b->agent) {
        if (c->cluster->n_agents >= M->cap) return fail(M, w, i, ERR_AGENTS, l, address, 0);
        b->agent = c->cluster->n_agents++;
        b->vc = calloc(2 * SHARED_PARTS * (size_t)M->cap, sizeof(i32));
      }
    }
    if (c->init) memset(c->init + offset, 1, 8);
    i32 *vc = b->vc, agent = b->agent;
    u32 phase = TRACKED(M) ? (b->phase + 1) & ~1u : 0; /* clocks never run backwards when a barrier is set up again */
    *b = (mbarrier){.phase = phase, .count = (i32)count, .pending = (i32)count, .offset = offset, .vc = vc,
                    .agent = agent, .alive = 1, .tx_phase = phase, .seen_phase = phase};
  }
  M->progress++;
  return SYS_NEXT;
}

EXPORT int sys_mbar_inval(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  for (u32 rest = m; rest; rest &= rest - 1) {
    cta *c;
    mbarrier *b = mbar_find(M, w, i, WROW(u32, i->o[1])[first_lane(rest)] + (u32)i->imm, &c);
    if (!b) return SYS_ERROR;
    b->alive = 0;
  }
  return SYS_NEXT;
}

/* The release of arriving lanes. A diverged warp arrives in parts, and each lane releases its own accesses. The last
 * part therefore completes the release of what all lanes had done before the first part. */
static void release_arrivals(machine *M, warp *w, mbarrier *b, u32 lanes) {
  i32 synced = w->synced, solo_synced = w->solo_synced;
  if (w->arrived_at != b || w->arrived & lanes) {
    w->arrived_at = b, w->arrived = 0, w->arrived_of = w->accessors | w->solo_lanes;
    w->arrived_clock = w->vc[w->agent], w->arrived_solo = w->vc[w->solo];
  }
  w->arrived |= lanes;
  if (!(w->arrived_of & ~w->arrived)) {
    if (w->arrived_clock > synced) w->synced = w->arrived_clock;
    if (w->arrived_solo > solo_synced) w->solo_synced = w->arrived_solo;
  }
  clock_release_lanes(M, w, b->vc, lanes);
  w->synced = synced, w->solo_synced = solo_synced;
}

/* arrive and expect_tx. o[0]: row of the returned state or none; o[1]: address; o[2]: count or bytes, or none. aux:
 * 0 arrive, 1 arrive.expect_tx, 2 expect_tx, 3 complete_tx, +4 arrive_drop, +8 64-bit address, +16 relaxed. */
EXPORT int sys_mbar_arrive(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  u32 kind = i->aux & 3;
  M->progress++;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u32 address = (i->aux & 8 ? (u32)WROW(u64, i->o[1])[l] : WROW(u32, i->o[1])[l]) + (u32)i->imm;
    cta *c;
    mbarrier *b = mbar_find(M, w, i, address, &c);
    if (!b) return SYS_ERROR;
    if (TRACKED(M)) shadow_lanes(M, w, c, b->offset, 8, TOUCH_CHECK, l, i);
    u32 n = i->o[2] == NONE ? 1 : WROW(u32, i->o[2])[l];
    if (kind >= 2) {
      b->tx += kind == 2 ? (i64)n : -(i64)n;
      b->tx_phase = b->phase + 1;
      if (b->tx >= 1 << 20) return fail(M, w, i, ERR_TX_RANGE, l, address, (u64)b->tx);
      if (kind == 3) mbar_complete(M, c, b);
      continue;
    }
    if (TRACKED(M)) {
      i32 agent = m & (m - 1) ? w->agent : w->solo, sent = w->vc[agent];
      release_tensor(M, w, i->aux & 16);
      if (i->aux & 16) {
        clock_release_relaxed(M, w, b->vc);
      } else {
        release_arrivals(M, w, b, m);
        sent = b->vc[agent];
      }
      incoming(M, w, c, agent, sent, (i32)(i - M->insns));
    }
    if (M->flags & FLAG_RACE) horizon_publish(M, w, &b->horizon, m);
    if (i->o[0] != NONE) WROW(u64, i->o[0])[l] = b->phase;
    if (i->aux & 4) b->count--;
    if (mbar_arrive(M, w, i, c, b, kind == 1 ? 1 : (i64)n, kind == 1 ? (i64)n : 0)) return SYS_ERROR;
  }
  return SYS_NEXT;
}

/* try_wait / test_wait. o[0]: result predicate; o[1]: address; o[2]: parity or state; aux bit 0: test, 1: parity,
 * 2: flipped parity (a planted fault), 3: 64-bit address, 4: relaxed. */
EXPORT int sys_mbar_wait(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  u32 result = 0, blocked_by = 0;
  mbarrier *last = NULL;
  int uniform = 1;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u32 address = (i->aux & 8 ? (u32)WROW(u64, i->o[1])[l] : WROW(u32, i->o[1])[l]) + (u32)i->imm;
    u32 want = i->aux & 2 ? WROW(u32, i->o[2])[l] : (u32)WROW(u64, i->o[2])[l];
    want = (want ^ (i->aux >> 2)) & 1;
    cta *c;
    mbarrier *b = mbar_find(M, w, i, address, &c);
    if (!b) return SYS_ERROR;
    if (last && last != b) uniform = 0;
    last = b;
    if (TRACKED(M)) shadow_lanes(M, w, c, b->offset, 8, TOUCH_CHECK, l, i);
    if ((b->phase & 1) != want) {
      result |= 1u << l;
      b->seen_phase = b->phase;
      if (TRACKED(M)) {
        if (i->aux & 16) clock_acquire_relaxed(M, w, released(M, b->vc));
        else clock_acquire(M, w, released(M, b->vc));
        acquire_tensor(M, w, i->aux & 16);
      }
      if (M->flags & FLAG_RACE) horizon_adopt(M, w, b->horizon);
    } else {
      blocked_by = address;
      f->info[1] = (i32)want;
    }
  }
  if (result == m || !uniform) goto answer;
  M->blocked[i - M->insns] = 1;
  if (i->aux & 1 || f->state) goto answer; /* test_wait, or a try_wait whose time is over */
  if (M->spurious && (M->rng = M->rng * 6364136223846793005ull + 1442695040888963407ull) >> 32 < M->spurious)
    goto answer;
  f->wait = WAIT_TRY;
  f->word = &last->phase;
  f->old = last->phase;
  f->info[0] = (i32)blocked_by;
  return SYS_BLOCK;
answer:
  f->state = 0;
  w->pred[i->o[0]] = (w->pred[i->o[0]] & ~m) | result;
  return SYS_NEXT;
}

/* ------------------------------------------------------------------ fences */
/* fence.acquire, release, acq_rel or sc up to cluster scope. aux as of clock_fence. */
EXPORT int sys_fence(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  clock_fence(M, w, m, i->aux);
  return SYS_NEXT;
}

/* fence.proxy.async orders earlier generic accesses with later accesses of the async proxy (PTX ISA, "memory
 * consistency model: proxies"). Remember the clock up to which this warp's knowledge is fenced. */
EXPORT int sys_fence_proxy(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f, (void)i, (void)m;
  if (TRACKED(M)) {
    clock_join(w->vc + M->cap, w->vc, M->cap);
    clock_tick(w); /* later accesses of this warp are not fenced */
  }
  return SYS_NEXT;
}
