/* Races over global memory. Memory that a launch never writes needs no bookkeeping, so a region gets its shadow at its
 * first store. Reads before that are not remembered. Clocks of one cluster mean nothing in another. So a warp keeps,
 * per other cluster, the clock that it learned through synchronising accesses. These are atomics and volatile,
 * relaxed, acquire or release loads and stores. Weaker ones count together with a fence, as in the PTX memory
 * consistency model. */
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct global_cell {
  u32 cluster;     /* index + 1; 0: none */
  i32 agent, clock, pc;
} global_cell;
typedef struct global_shadow {
  global_cell *writes, *reads;
} global_shadow;

/* The state of a synchronisation variable: a clock per cluster that released to it. */
typedef struct sync_variable {
  u64 address;
  i32 **clocks;
} sync_variable;

typedef struct world {
  i32 n_clusters, n_variables, room;
  sync_variable *variables;
} world;

enum { UNFENCED = 64 }; /* reads; earlier ones are forgotten */
/* Per warp: clocks learned of other clusters, and the snapshot taken by the last fence. Also the clocks that only
 * ``lanes`` have learned since the lanes of the warp last synchronised, and reads that wait for a fence. */
typedef struct horizon {
  i32 **known, **fresh, **fenced;
  u32 lanes;
  u64 unfenced[UNFENCED];
  i32 n_unfenced;
} horizon;

void world_new(machine *M, i32 n_clusters) {
  M->world = calloc(1, sizeof *M->world);
  M->world->n_clusters = n_clusters;
}
void world_free(machine *M) {
  world *all = M->world;
  for (i32 k = 0; k < all->n_variables; k++) {
    for (i32 c = 0; c < all->n_clusters; c++) free(all->variables[k].clocks[c]);
    free(all->variables[k].clocks);
  }
  free(all->variables), free(all);
  M->world = NULL;
}

static horizon *horizon_of(machine *M, warp *w) {
  if (!w->horizon) {
    horizon *h = w->horizon = calloc(1, sizeof(horizon));
    h->known = calloc((size_t)M->world->n_clusters, sizeof(i32 *));
    h->fresh = calloc((size_t)M->world->n_clusters, sizeof(i32 *));
    h->fenced = calloc((size_t)M->world->n_clusters, sizeof(i32 *));
  }
  return w->horizon;
}
void horizon_free(machine *M, warp *w) {
  horizon *h = w->horizon;
  if (!h) return;
  for (i32 c = 0; c < M->world->n_clusters; c++) free(h->known[c]), free(h->fresh[c]), free(h->fenced[c]);
  free(h->known), free(h->fresh), free(h->fenced), free(h);
  w->horizon = NULL;
}

static void learn(machine *M, i32 **into, i32 cluster, const i32 *clock) {
  if (!clock) return;
  if (!into[cluster]) into[cluster] = calloc(SHARED_PARTS * (size_t)M->cap, sizeof(i32));
  clock_join(into[cluster], clock, SHARED_PARTS * M->cap);
}

static sync_variable *new_variable(machine *M, u64 address) {
  world *all = M->world;
  if (all->n_variables == all->room) {
    all->room = all->room ? 2 * all->room : 16;
    all->variables = realloc(all->variables, (size_t)all->room * sizeof(sync_variable));
  }
  sync_variable *v = &all->variables[all->n_variables++];
  *v = (sync_variable){address, calloc((size_t)all->n_clusters, sizeof(i32 *))};
  return v;
}
static sync_variable *variable_at(machine *M, u64 address) {
  world *all = M->world;
  for (i32 k = 0; k < all->n_variables; k++)
    if (all->variables[k].address == address) return &all->variables[k];
  return new_variable(M, address);
}

/* Some lanes acquire a clock: the other lanes know it from the next bar.warp.sync or wider barrier on. */
static void acquire_from(machine *M, warp *w, sync_variable *v, u32 lanes) {
  horizon *h = horizon_of(M, w);
  i32 own = w->cta->cluster->index;
  int is_whole = !(w->live & ~lanes);
  for (i32 c = 0; c < M->world->n_clusters; c++) {
    if (!v->clocks[c]) continue;
    if (c == own) clock_acquire(M, w, v->clocks[c]);
    else learn(M, is_whole ? h->known : h->fresh, c, v->clocks[c]);
  }
  if (!is_whole) h->lanes |= lanes;
}
void horizon_sync(machine *M, warp *w) {
  horizon *h = w->horizon;
  if (!h || !h->lanes) return;
  for (i32 c = 0; c < M->world->n_clusters; c++) learn(M, h->known, c, h->fresh[c]);
  h->lanes = 0;
}
/* The clock of another cluster that these lanes know. */
static void learn_from(machine *M, i32 **into, i32 c, const horizon *h, u32 lanes) {
  learn(M, into, c, h->known[c]);
  if (h->lanes & lanes) learn(M, into, c, h->fresh[c]);
}

/* A read that a later fence makes an acquire. A loop that polls reads the same few addresses over and over. */
static void remember(horizon *h, u64 address) {
  for (i32 k = 0; k < h->n_unfenced; k++) if (h->unfenced[k] == address) return;
  if (h->n_unfenced == UNFENCED) memmove(h->unfenced, h->unfenced + 1, --h->n_unfenced * sizeof address);
  h->unfenced[h->n_unfenced++] = address;
}

/* Lanes that act together release together. */
static void release_lanes(machine *M, warp *w, i32 **clocks, u32 lanes) {
  i32 own = w->cta->cluster->index;
  if (!clocks[own]) clocks[own] = calloc(SHARED_PARTS * (size_t)M->cap, sizeof(i32));
  clock_release_lanes(M, w, clocks[own], lanes);
}

void global_order(machine *M, warp *w, u64 address, int lane, const insn *i) {
  u32 lanes = 1u << lane;
  horizon *h = horizon_of(M, w);
  sync_variable *v = variable_at(M, address);
  i32 own = w->cta->cluster->index;
  if (i->aux & AUX_ACQUIRE) acquire_from(M, w, v, lanes);
  else if (!(i->aux & AUX_RELEASE)) remember(h, address);
  if (i->aux & AUX_RELEASE) {
    for (i32 c = 0; c < M->world->n_clusters; c++) if (c != own) learn_from(M, v->clocks, c, h, lanes);
    release_lanes(M, w, v->clocks, w->actor == w->solo ? lanes : FULL);
  } else {
    for (i32 c = 0; c < M->world->n_clusters; c++) learn(M, v->clocks, c, h->fenced[c]);
  }
}

/* A strong access to shared memory orders as one to global memory does. Its variable has an address that global memory
 * lacks. */
void shared_order(machine *M, warp *w, const cta *c, u32 offset, int lane, const insn *i) {
  u64 address = 1ull << 63 | (u64)c->cluster->index << 32 | c->rank << RANK_SHIFT | offset;
  if (i->aux & AUX_STRONG) global_order(M, w, address, lane, i);
}

/* Hand on the clocks of other clusters to the warps that wait for this one at a barrier. Early arrivals of the next
 * phase are heard as well: a race may hide behind them, none is made up. */
void horizon_publish(machine *M, warp *w, u32 *barrier, u32 lanes) {
  horizon *h = w->horizon;
  if (!h) return;
  if (!*barrier) new_variable(M, 0), *barrier = (u32)M->world->n_variables;
  i32 **clocks = M->world->variables[*barrier - 1].clocks;
  for (i32 c = 0; c < M->world->n_clusters; c++) if (c != w->cta->cluster->index) learn_from(M, clocks, c, h, lanes);
}
void horizon_adopt(machine *M, warp *w, u32 barrier) {
  if (!barrier) return;
  i32 **clocks = M->world->variables[barrier - 1].clocks;
  for (i32 c = 0; c < M->world->n_clusters; c++) learn(M, horizon_of(M, w)->known, c, clocks[c]);
}

/* fence.acq_rel / fence.sc / membar at gpu or system scope. */
EXPORT int sys_fence_gpu(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  clock_fence(M, w, m, i->aux);
  if (!(M->flags & FLAG_RACE)) return SYS_NEXT;
  horizon *h = horizon_of(M, w);
  for (i32 k = 0; k < h->n_unfenced; k++) acquire_from(M, w, variable_at(M, h->unfenced[k]), m);
  h->n_unfenced = 0;
  i32 own = w->cta->cluster->index;
  for (i32 c = 0; c < M->world->n_clusters; c++) if (c != own) learn_from(M, h->fenced, c, h, m);
  release_lanes(M, w, h->fenced, m);
  return SYS_NEXT;
}

static int ordered(warp *w, const i32 *vc, const global_cell *o, u32 lanes) {
  i32 cluster = (i32)o->cluster - 1;
  if (cluster == w->cta->cluster->index) return o->clock <= vc[o->agent];
  horizon *h = w->horizon;
  if (!h) return 0;
  const i32 *known = h->known[cluster], *fresh = h->lanes & lanes ? h->fresh[cluster] : NULL;
  return (known && o->clock <= known[o->agent]) || (fresh && o->clock <= fresh[o->agent]);
}

static void report(machine *M, warp *w, const region *r, u64 cell, int write, i32 pc, const global_cell *o,
                   int other_write, i32 agent) {
  hazard_report(M, (hazard){.kind = HAZARD_GLOBAL, .write = write, .other_write = other_write, .pc = pc,
                            .other_pc = o->pc, .agent = agent, .other_agent = o->agent, .rank = (i32)o->cluster - 1,
                            .cluster = w->cta->cluster->index, .cell = r->base + 4 * cell});
}

static void touch_global(machine *M, warp *w, region *r, u64 address, u32 n, int write, i32 pc, i32 agent, i32 clock,
                         const i32 *vc, u32 lanes) {
  global_shadow *s = r->shadow;
  if (!s) {
    if (!write) return;
    s = r->shadow = calloc(1, sizeof *s);
    s->writes = calloc(r->size / 4 + 2, sizeof(global_cell));
    s->reads = calloc(r->size / 4 + 2, sizeof(global_cell));
  }
  u64 at = address - r->base;
  for (u64 cell = at / 4; cell * 4 < at + n; cell++) {
    global_cell *wr = &s->writes[cell], *rd = &s->reads[cell];
    /* Neighbouring 16-bit elements of one cell may belong to different warps: only whole cells are compared. */
    int whole = cell * 4 >= at && cell * 4 + 4 <= at + n;
    if (whole && write < 2 && wr->cluster && !ordered(w, vc, wr, lanes)) report(M, w, r, cell, write, pc, wr, 1, agent);
    if (!write) {
      *rd = (global_cell){(u32)w->cta->cluster->index + 1, agent, clock, pc};
      continue;
    }
    if (whole && rd->cluster && !ordered(w, vc, rd, lanes)) report(M, w, r, cell, 1, pc, rd, 0, agent);
    *wr = (global_cell){(u32)w->cta->cluster->index + 1, agent, clock, pc};
  }
}
void global_touch(machine *M, warp *w, region *r, u64 address, u32 n, int write, int lane, const insn *i) {
  touch_global(M, w, r, address, n, write, (i32)(i - M->insns), w->actor, w->vc[w->actor], w->vc, 1u << lane);
}
/* An access by an asynchronous engine on behalf of a warp. */
EXPORT void core_global_touch(machine *M, warp *w, u64 address, u32 n, int write, i32 pc, i32 agent, i32 clock,
                              const i32 *vc) {
  region *r = region_find(M, address, address + n);
  if (r) touch_global(M, w, r, address, n, write, pc, agent, clock, vc, FULL);
}
EXPORT void core_region_free(region *r) {
  if (!r->shadow) return;
  free(r->shadow->writes), free(r->shadow->reads), free(r->shadow);
  r->shadow = NULL;
}
