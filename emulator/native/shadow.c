/* Happens-before race detection over shared and tensor memory, independent of the schedule that was run.
 *
 * Every warp, every ordered asynchronous stream of a warp and every mbarrier is an agent with a logical clock. A
 * vector clock holds, per agent, the latest time known to have happened before. Its other parts (CLOCK_*) hold what
 * fences cover of that. Each cell remembers its last write, the last read and the last atomic operation of every
 * agent. An access conflicts with an earlier one to the same bytes that its clock does not cover (after Flanagan and
 * Freund, "FastTrack", PLDI 2009). Strong accesses do not conflict with each other (PTX ISA, "data races"). */
#include "core.h"
#include <stdlib.h>

static void last_accesses_new(last_accesses *x, i32 cap) {
  x->cells = calloc((size_t)cap, sizeof *x->cells);
  x->agents = calloc((size_t)cap, sizeof *x->agents);
}
static void last_accesses_free(last_accesses *x) {
  for (u32 k = 0; k < x->n; k++) free(x->cells[x->agents[k]]);
  free(x->cells), free(x->agents);
}
EXPORT shadow *core_shadow_new(u32 cells, i32 cap) {
  shadow *s = calloc(1, sizeof *s);
  s->cells = cells;
  s->w_agent = calloc(cells, sizeof *s->w_agent);
  s->w_clock = calloc(cells, sizeof *s->w_clock);
  s->w_pc = calloc(cells, sizeof *s->w_pc);
  s->w_bytes = calloc(cells, 1);
  s->w_lane = calloc(cells, 1);
  last_accesses_new(&s->readers, cap), last_accesses_new(&s->atomics, cap);
  return s;
}
EXPORT void core_shadow_free(shadow *s) {
  if (!s) return;
  last_accesses_free(&s->readers), last_accesses_free(&s->atomics);
  free(s->w_agent), free(s->w_clock), free(s->w_pc), free(s->w_bytes), free(s->w_lane), free(s);
}

void clock_join(i32 *into, const i32 *from, int n) {
  for (int k = 0; k < n; k++) into[k] = into[k] > from[k] ? into[k] : from[k];
}
void clock_release(machine *M, warp *w, i32 *into) {
  clock_join(into, w->vc, SHARED_PARTS * M->cap);
  clock_tick(w);
}
void clock_tick(warp *w) { w->vc[w->agent]++, w->vc[w->solo]++; }

/* The release of one lane does not cover accesses of other lanes since the last bar.warp.sync (or wider barrier). PTX
 * orders memory between lanes only there. A warp is therefore two agents: lanes that act together, and a lane that
 * acts alone. The release of an elected lane covers its own accesses, and no access of another lane. Collective
 * instructions (ldmatrix, wgmma) count as done by every lane. */
static void cut(const machine *M, i32 *vc, i32 agent, i32 synced) {
  vc[agent] = synced;
  if (vc[M->cap + agent] > synced) vc[M->cap + agent] = synced;
}
/* Reduces the warp's clock to what these lanes may release. */
EXPORT void core_clock_cut(const machine *M, const warp *w, u32 lanes, i32 *vc) {
  if (w->accessors & ~lanes) cut(M, vc, w->agent, w->synced);
  if (w->solo_lanes & ~lanes) cut(M, vc, w->solo, w->solo_synced);
}
void clock_release_lanes(machine *M, warp *w, i32 *into, u32 lanes) {
  i32 own[] = {w->vc[w->agent], w->vc[w->solo]}, fenced[] = {w->vc[M->cap + w->agent], w->vc[M->cap + w->solo]};
  core_clock_cut(M, w, lanes, w->vc);
  clock_join(into, w->vc, SHARED_PARTS * M->cap);
  w->vc[w->agent] = own[0] + 1, w->vc[w->solo] = own[1] + 1;
  w->vc[M->cap + w->agent] = fenced[0], w->vc[M->cap + w->solo] = fenced[1];
}
void clock_sync_lanes(machine *M, warp *w) {
  if (!M->cap) return;
  w->synced = w->vc[w->agent], w->solo_synced = w->vc[w->solo];
  w->accessors = w->solo_lanes = 0;
  clock_tick(w);
  if (M->flags & FLAG_RACE) horizon_sync(M, w);
}
void clock_acquire(machine *M, warp *w, const i32 *from) {
  clock_join(w->vc, from, SHARED_PARTS * M->cap);
  /* Releases of the warp's own lanes through this are ordered between them, too. */
  if (from[w->agent] > w->synced) w->synced = from[w->agent];
  if (from[w->solo] > w->solo_synced) w->solo_synced = from[w->solo];
}

/* A relaxed arrival releases what the last fence before it covers. The next fence acquires what a relaxed wait has
 * seen. See PTX ISA, "memory consistency model: release and acquire patterns". tcgen05.fence composes with both. */
static void join_sent(machine *M, i32 *into, const i32 *from) {
  size_t sent = (size_t)CLOCK_SENT * (size_t)M->cap;
  clock_join(into + sent, from + sent, M->cap);
}
static i32 *clock_at(machine *M, i32 **place) {
  if (!*place) *place = calloc(SHARED_PARTS * (size_t)M->cap, sizeof(i32));
  return *place;
}
void clock_release_relaxed(machine *M, warp *w, i32 *into) {
  if (w->fenced) clock_join(into, w->fenced, CLOCK_SENT * M->cap);
  join_sent(M, into, w->vc);
  clock_tick(w);
}
void clock_acquire_relaxed(machine *M, warp *w, const i32 *from) {
  clock_join(clock_at(M, &w->unfenced), from, CLOCK_SENT * M->cap);
  join_sent(M, w->vc, from);
}
/* order: AUX_ACQUIRE, AUX_RELEASE or both. */
void clock_fence(machine *M, warp *w, u32 lanes, u32 order) {
  if (!M->cap) return;
  if (order & AUX_ACQUIRE && w->unfenced) clock_acquire(M, w, w->unfenced);
  if (order & AUX_RELEASE) clock_release_lanes(M, w, clock_at(M, &w->fenced), lanes);
}

/* tcgen05.fence composes with every operation that orders threads (PTX ISA, "specialized inter-thread synchronization
 * for tcgen05 instructions"). Accesses of a thread to tensor memory before fence::before_thread_sync are ordered
 * before its later synchronisation. Accesses after fence::after_thread_sync are ordered behind its earlier
 * synchronisation. */
void tensor_fence_before(machine *M, warp *w) {
  clock_join(clock_part(M, w->vc, CLOCK_SENT), clock_part(M, w->vc, CLOCK_LANE), M->cap);
}
void tensor_fence_after(machine *M, warp *w) {
  clock_join(clock_part(M, w->vc, CLOCK_WARP), clock_part(M, w->vc, CLOCK_SENT), M->cap);
  clock_join(clock_part(M, w->vc, CLOCK_LANE), clock_part(M, w->vc, CLOCK_SENT), M->cap);
}

/* aux: 0 before_thread_sync, 1 after_thread_sync. Each thread fences its own accesses, and all lanes execute
 * tcgen05.ld and tcgen05.st. So a fence of some lanes does not cover the accesses of their warp. */
EXPORT int sys_tensor_fence(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  if (!M->cap) return SYS_NEXT;
  u32 *fenced = i->aux ? &w->fenced_after : &w->fenced_before;
  *fenced |= m;
  int is_whole = !(w->live & ~*fenced);
  i32 *sent = clock_part(M, w->vc, CLOCK_SENT);
  if (is_whole) {
    *fenced = 0;
    if (i->aux) tensor_fence_after(M, w);
    else tensor_fence_before(M, w);
  } else if (i->aux) {
    clock_join(clock_part(M, w->vc, CLOCK_LANE), sent, M->cap);
  } else {
    i32 loads = sent[w->tensor_loads], stores = sent[w->tensor_stores];
    tensor_fence_before(M, w);
    sent[w->tensor_loads] = loads, sent[w->tensor_stores] = stores;
  }
  return SYS_NEXT;
}

hazard *hazard_report(machine *M, hazard h) {
  for (int k = 0; k < M->n_hazards; k++) {
    hazard *o = &M->hazards[k];
    if (o->kind == h.kind && o->pc == h.pc && o->other_pc == h.other_pc && o->write == h.write &&
        o->other_write == h.other_write && o->tmem == h.tmem) {
      o->count++;
      return o;
    }
  }
  if (M->n_hazards == MAX_HAZARDS) return NULL;
  h.count = 1;
  M->hazards[M->n_hazards] = h;
  return &M->hazards[M->n_hazards++];
}

/* lane: 0 for an asynchronous engine, 1 + the lane of an access by a warp, LANE_SEVERAL where lanes that read together
 * are remembered, LANE_STRONG for strong reads. A collective instruction is a lane of its own: its accesses are ordered
 * with no lane's. */
enum { LANE_SEVERAL = LANE_COLLECTIVE + 2, LANE_STRONG };
typedef struct actor {
  i32 agent, clock, pc;
  const i32 *vc;
  u32 touch;
  int is_tmem;
  u32 lane;
  const warp *w;
} actor;

/* Whether an earlier access of the same warp by another lane has no bar.warp.sync, or anything wider, behind it. */
static inline int lanes_unordered(const actor *a, i32 other, i32 clock, u32 lane) {
  if (!a->w || !lane || lane == a->lane || lane == LANE_STRONG) return 0;
  return (other == a->w->agent && clock > a->w->synced) || (other == a->w->solo && clock > a->w->solo_synced);
}

/* Whether an access is ordered behind what another agent did at a time. */
static inline i32 clock_of(const machine *M, const actor *a, int part, i32 agent) {
  return a->vc[part * M->cap + agent];
}
static inline int ordered(const machine *M, const actor *a, i32 other, i32 clock) {
  int part = !a->is_tmem ? CLOCK_KNOWN : a->touch & TOUCH_LANE ? CLOCK_LANE : CLOCK_WARP;
  return clock <= clock_of(M, a, part, other);
}

/* hazard.tmem: 0 for other memory; TMEM_SENT if a fence::before_thread_sync is behind the earlier access. */
enum { TMEM = 1, TMEM_SENT = 2 };
static void report(machine *M, cta *c, u32 cell, const actor *a, int kind, int tmem, int other_write, i32 other_pc,
                   i32 other) {
  hazard_report(M, (hazard){.kind = kind, .write = (a->touch & TOUCH_WRITE) != 0, .other_write = other_write,
                            .pc = a->pc, .other_pc = other_pc, .agent = a->agent, .other_agent = other, .tmem = tmem,
                            .rank = (i32)c->rank, .cluster = c->cluster->index, .cell = cell});
}
static void conflict(machine *M, cta *c, u32 cell, const actor *a, i32 clock, int other_write, i32 other_pc,
                     i32 other) {
  int is_known = a->is_tmem && clock <= clock_of(M, a, CLOCK_KNOWN, other);
  int tmem = !a->is_tmem ? 0 : clock <= clock_of(M, a, CLOCK_SENT, other) ? TMEM_SENT : TMEM;
  report(M, c, cell, a, is_known ? HAZARD_TENSOR_FENCE : HAZARD_RACE, tmem, other_write, other_pc, other);
}

static void remember(last_accesses *x, const shadow *s, u32 cell, u32 bytes, const actor *a, u32 lane) {
  if (!x->cells[a->agent]) {
    x->cells[a->agent] = calloc(s->cells, sizeof(cell_clock));
    x->agents[x->n++] = a->agent;
  }
  cell_clock *r = &x->cells[a->agent][cell];
  if (r->clock == a->clock && (r->pc >> 22 & 63) != lane) lane = LANE_SEVERAL;
  *r = (cell_clock){a->clock, (u32)a->pc | lane << 22 | bytes << 28};
}

/* Report accesses that this one is not ordered behind. */
static void compare(machine *M, cta *c, last_accesses *x, u32 cell, u32 bytes, const actor *a, int other_write) {
  for (u32 k = 0; k < x->n; k++) {
    i32 other = x->agents[k];
    cell_clock r = x->cells[other][cell];
    u32 lane = r.pc >> 22 & 63;
    if (!(r.pc >> 28 & bytes) || (a->touch & TOUCH_STRONG && lane == LANE_STRONG)) continue;
    if (M->flags & FLAG_RACE && (!ordered(M, a, other, r.clock) || lanes_unordered(a, other, r.clock, lane))) {
      conflict(M, c, cell, a, r.clock, other_write, (i32)(r.pc & 0x3fffff), other);
      x->cells[other][cell].clock = 0;
    } else if (M->flags & FLAG_PROXY && other_write && a->touch & TOUCH_ASYNC && r.clock > a->vc[M->cap + other]) {
      report(M, c, cell, a, HAZARD_PROXY, 0, 1, (i32)(r.pc & 0x3fffff), other);
    }
  }
}

enum { BYTES_GENERIC = 16 };

static inline void touch(machine *M, cta *c, shadow *s, u32 cell, u32 bytes, const actor *a) {
  if (cell >= s->cells) return; /* out of bounds: the access itself reports that */
  u32 written = s->w_bytes[cell];
  if (written & bytes) {
    i32 other = s->w_agent[cell], clock = s->w_clock[cell];
    /* Lanes that write one place in the same instruction write it in some order. */
    int together = s->w_pc[cell] == a->pc && other == a->agent && clock == a->clock;
    if (M->flags & FLAG_RACE
        && (!ordered(M, a, other, clock) || (!together && lanes_unordered(a, other, clock, s->w_lane[cell]))))
      conflict(M, c, cell, a, clock, 1, s->w_pc[cell], other);
    else if (M->flags & FLAG_PROXY && a->touch & TOUCH_ASYNC && written & BYTES_GENERIC
             && clock > a->vc[M->cap + other])
      report(M, c, cell, a, HAZARD_PROXY, 0, 1, s->w_pc[cell], other);
  }
  int is_strong = (a->touch & TOUCH_STRONG) != 0;
  if (!is_strong) compare(M, c, &s->atomics, cell, bytes, a, 1);
  if (a->touch & TOUCH_CHECK) return;
  if (!(a->touch & TOUCH_WRITE)) {
    remember(&s->readers, s, cell, bytes, a, is_strong ? LANE_STRONG : a->lane);
    return;
  }
  compare(M, c, &s->readers, cell, bytes, a, 0);
  if (is_strong) {
    remember(&s->atomics, s, cell, bytes, a, a->lane);
    return;
  }
  if (s->w_agent[cell] == a->agent && s->w_clock[cell] == a->clock) bytes |= written & 15;
  s->w_agent[cell] = a->agent;
  s->w_clock[cell] = a->clock;
  s->w_pc[cell] = a->pc;
  s->w_lane[cell] = (u8)a->lane;
  s->w_bytes[cell] = (u8)(bytes | (a->touch & TOUCH_ASYNC ? 0 : BYTES_GENERIC));
}

static void touch_bytes(machine *M, cta *c, u32 offset, u32 n, const actor *a) {
  u32 end = offset + n;
  for (u32 cell = offset / 4; cell * 4 < end; cell++) {
    u32 lo = cell * 4 < offset ? offset - cell * 4 : 0, hi = end - cell * 4 < 4 ? end - cell * 4 : 4;
    touch(M, c, c->shadow, cell, (15u >> (4 - hi)) & (15u << lo) & 15u, a);
  }
}

/* An access of one lane through the generic proxy. */
void shadow_lanes(machine *M, warp *w, cta *c, u32 offset, u32 n, u32 touch_kind, int lane, const insn *i) {
  actor a = {w->actor, w->vc[w->actor], (i32)(i - M->insns), w->vc, touch_kind, 0, 1 + (u32)lane, w};
  if (!(touch_kind & TOUCH_CHECK)) incoming(M, w, c, a.agent, a.clock, a.pc);
  touch_bytes(M, c, offset, n, &a);
}

/* Accesses of the asynchronous engines. */
EXPORT void core_shadow_bytes(machine *M, cta *c, u32 offset, u32 n, u32 touch_kind, i32 agent, i32 clock,
                              const i32 *vc, i32 pc) {
  actor a = {agent, clock, pc, vc, touch_kind, 0, 0, NULL};
  touch_bytes(M, c, offset, n, &a);
}
EXPORT void core_shadow_chunks(machine *M, cta *c, const i32 *chunks, i32 n, u32 touch_kind, i32 agent, i32 clock,
                               const i32 *vc, i32 pc) {
  actor a = {agent, clock, pc, vc, touch_kind, 0, 0, NULL};
  for (i32 k = 0; k < n; k++)
    for (u32 j = 0; j < 4; j++) touch(M, c, c->shadow, (u32)chunks[k] * 4 + j, 15, &a);
}
/* Tensor memory: cell = (lane / 16) * 512 + column. */
EXPORT void core_shadow_tmem(machine *M, cta *c, u32 lane_groups, u32 column, u32 n, u32 touch_kind, i32 agent,
                             i32 clock, const i32 *vc, i32 pc) {
  actor a = {agent, clock, pc, vc, touch_kind, 1, 0, NULL};
  for (u32 g = 0; g < 8; g++)
    if (lane_groups >> g & 1)
      for (u32 k = 0; k < n; k++) touch(M, c, c->tmem_shadow, g * 512 + ((column + k) & 511), 15, &a);
}
