/* The run loop: executes one warp until it blocks, exits, uses up its time slice or needs Python.
 *
 * Divergence: a warp is a list of fragments (program counter, lanes). The runnable fragment with the lowest program
 * counter runs, and fragments that meet at one program counter merge. Compilers place reconvergence points after the
 * divergent blocks, so this gives the convergence that .aligned and .sync instructions rely on. */
#include <stdlib.h>

#include "lane.h"

/* ------------------------------------------------------------------ register checks */
static inline u32 row_kind(u32 ref) { return ref >> 28; }
static inline u32 row_slot(u32 ref) { return (ref & 0xfffffff) / 64; }
static const u32 row_bytes[] = {0, 2, 4, 8, 16};

/* Strict and race modes, and warps with registers owned by an asynchronous operation. -1: go on. */
static int check_registers(machine *M, warp *w, const insn *i, u32 m) {
  const u32 *refs = M->refs + i->refs;
  int is_move = i->kind == KIND_LANE && i->aux & AUX_MOVE;
  /* Compilers move register initialisation past wgmma.fence, an asm statement that names no registers: moves hand on
   * what they copy, and constants count as untouched. */
  u8 touched = is_move ? 0 : TOUCHED_WRITTEN;
  u32 origin = 0;
  for (u32 k = 0; k < i->n_use; k++) {
    if (row_kind(refs[k]) == ROW_PRED) continue;
    u32 s = row_slot(refs[k]);
    if (w->n_busy && w->busy[s]) {
      if (w->busy[s] == BUSY_LOAD) return RUN_SCOREBOARD;
      /* Moves of accumulators in flight come from loops whose values the compiler keeps apart: in hardware there is
       * no move. */
      if (w->busy[s] == BUSY_WRITTEN && is_move) return RUN_SETTLE;
      if (w->busy[s] == BUSY_WRITTEN) return fail(M, w, i, ERR_IN_FLIGHT, -1, s, 0), RUN_ERROR;
    }
    if (M->flags & FLAG_STRICT && m & ~w->written[s])
      return fail(M, w, i, ERR_UNINIT_REG, first_lane(m & ~w->written[s]), s, k), RUN_ERROR;
    if (is_move) touched = w->touched[s], origin = w->origin[s] ? w->origin[s] : s + 1;
    else w->touched[w->origin[s] ? w->origin[s] - 1 : s] |= TOUCHED_READ; /* reading a copy reads the register */
  }
  for (u32 k = i->n_use; k < (u32)i->n_use + i->n_def; k++) {
    if (row_kind(refs[k]) == ROW_PRED) continue;
    u32 s = row_slot(refs[k]);
    if (w->n_busy && w->busy[s]) {
      if (w->busy[s] == BUSY_LOAD) return RUN_SCOREBOARD;
      return fail(M, w, i, ERR_IN_FLIGHT, -1, s, 1), RUN_ERROR;
    }
    w->written[s] |= m;
    w->touched[s] = touched;
    w->origin[s] = origin;
  }
  return -1;
}

/* Registers of an instruction that Python executes. */
EXPORT int core_check(machine *M, warp *w, i32 pc, u32 m) { return check_registers(M, w, M->insns + pc, m); }

/* ------------------------------------------------------------------ lane instructions under a mask */
static void masked(machine *M, warp *w, const insn *i, u32 m) {
  enum { MOST = 8 };
  const u32 *defs = M->refs + i->refs + i->n_use;
  u8 old[MOST][16 * LANES];
  u32 old_pred[MOST], n = i->n_def < MOST ? i->n_def : MOST;
  for (u32 k = 0; k < n; k++) {
    u32 at = defs[k] & 0xfffffff, kind = row_kind(defs[k]);
    if (kind == ROW_PRED) old_pred[k] = w->pred[at];
    else memcpy(old[k], w->file + at, row_bytes[kind] * LANES);
  }
  ((lane_fn)i->fn)(w->file, w->pred, i);
  for (u32 k = 0; k < n; k++) {
    u32 at = defs[k] & 0xfffffff, kind = row_kind(defs[k]);
    if (kind == ROW_PRED) { w->pred[at] = (w->pred[at] & m) | (old_pred[k] & ~m); continue; }
    u8 *row = w->file + at;
    if (kind == ROW_32) {
      u32 *d = (u32 *)row, *o = (u32 *)old[k];
      LOOP d[l] = m >> l & 1 ? d[l] : o[l];
    } else {
      u32 b = row_bytes[kind];
      for (int l = 0; l < LANES; l++) if (!(m >> l & 1)) memcpy(row + b * (u32)l, old[k] + b * (u32)l, b);
    }
  }
}

/* ------------------------------------------------------------------ fragments */
static int ready(const warp *w, const frag *f) {
  switch (f->wait) {
    case WAIT_NO: return 1;
    case WAIT_WORD: case WAIT_TRY: return *f->word != f->old;
    case WAIT_CONVERGE: return !(w->live & f->want & ~f->mask);
    default: return 0;
  }
}

/* The runnable fragment with the lowest program counter. After a full time slice without reaching another fragment the
 * choice rotates, so that lanes polling memory cannot starve the lanes they wait for. */
static frag *pick(warp *w) {
  frag *best = NULL, *high = NULL;
  for (int k = 0; k < w->n_frags; k++) {
    frag *f = &w->frags[k];
    if (!ready(w, f)) continue;
    if (!best || f->pc < best->pc) best = f;
    if (!high || f->pc > high->pc) high = f;
  }
  if (w->turn) {
    w->turn = 0;
    best = high;
  }
  if (best) best->wait = WAIT_NO;
  return best;
}

static void drop(warp *w, frag *f) { *f = w->frags[--w->n_frags]; }

/* Joins every fragment at f's program counter into f, which starts that instruction afresh. Returns 1 if another
 * runnable fragment is behind f. */
static int meet(warp *w, frag **fp) {
  int behind = 0, own = (int)(*fp - w->frags);
  for (int k = w->n_frags - 1; k >= 0; k--) {
    frag *g = &w->frags[k];
    if (k == own) continue;
    if (g->pc == w->frags[own].pc) {
      w->frags[own].mask |= g->mask;
      w->frags[own].state = 0;
      int last = --w->n_frags;
      *g = w->frags[last];
      if (own == last) own = k;
    } else if (g->pc < w->frags[own].pc) {
      behind |= ready(w, g);
    }
  }
  *fp = &w->frags[own];
  return behind;
}

/* Lanes of a fragment exit. */
static void retire(machine *M, warp *w, frag *f, u32 lanes) {
  w->live &= ~lanes;
  f->mask &= ~lanes;
  if (!f->mask) drop(w, f);
  M->progress++;
  if (w->live) return;
  cta *c = w->cta;
  c->live_warps--;
  c->cluster->live_warps--;
  for (int k = 0; k < 16; k++) if (c->bars[k].whole) barrier_settle(M, c, &c->bars[k]);
  cluster_settle(M, c->cluster);
  if (!c->live_warps) {
    c->exited = 1;
    exit_check(M, c);
  }
}

/* ------------------------------------------------------------------ the loop */
static int event(machine *M, warp *w, frag *f, u32 m, int status) {
  M->ev_pc = f->pc;
  M->ev_frag = (i32)(f - w->frags);
  M->ev_mask = m;
  return status;
}

/* A call of core_run. Its steps return 1 to go on with `f`, or 0 to return `status`. */
typedef struct slice {
  machine *M;
  warp *w;
  frag *f;
  u32 careful;
  int status;
  i64 executed;
} slice;

static int other_fragment(slice *s) {
  s->f = pick(s->w);
  if (!s->f) s->status = RUN_BLOCKED;
  return s->f != NULL;
}

/* The instruction is executed or skipped: the next one is behind it. */
static inline int go_on(slice *s) {
  s->M->count[s->f->pc]++;
  s->executed++;
  s->f->pc++;
  return 1;
}

static int stop(slice *s, u32 m, int status) {
  s->status = status == RUN_ERROR ? status : event(s->M, s->w, s->f, m, status);
  return 0;
}

/* -1: execute the instruction. Otherwise what a step returns. */
static int await_registers(slice *s, const insn *i, u32 m) {
  int r = check_registers(s->M, s->w, i, m);
  if (r < 0) return -1;
  if (r != RUN_SETTLE) return stop(s, m, r);
  r = wgmma_settle(s->M, s->w, s->f);
  if (r == SYS_NEXT) return 1;
  return r == SYS_ERROR ? stop(s, m, RUN_ERROR) : other_fragment(s);
}

static inline int lane_step(slice *s, const insn *i, u32 m) {
  warp *w = s->w;
  if (!m) return go_on(s);
  if (s->careful | w->n_busy) {
    int r = await_registers(s, i, m);
    if (r >= 0) return r;
  }
  if (m == FULL) ((lane_fn)i->fn)(w->file, w->pred, i);
  else masked(s->M, w, i, m);
  s->M->lanes[s->f->pc] += (u64)__builtin_popcount(m);
  return go_on(s);
}

static inline int branch_step(slice *s, const insn *i, u32 m) {
  frag *f = s->f;
  s->M->count[f->pc]++;
  s->executed += i->target <= f->pc ? 5 : 1; /* loops use up the slice sooner: fairness between polling warps */
  if (m == f->mask) {
    f->pc = i->target;
    return 1;
  }
  if (m) {
    s->w->frags[s->w->n_frags++] = (frag){.pc = i->target, .mask = m};
    f->mask &= ~m;
  }
  f->pc++;
  return 1;
}

static int exit_step(slice *s, u32 m) {
  frag *f = s->f;
  s->M->count[f->pc]++;
  s->executed++;
  int all = m == f->mask;
  if (!all) f->pc++;
  if (m) retire(s->M, s->w, f, m);
  if (!s->w->live) { s->status = RUN_EXITED; return 0; }
  return all ? other_fragment(s) : 1;
}

static inline int system_step(slice *s, const insn *i, u32 m) {
  if (s->careful | s->w->n_busy) {
    int r = await_registers(s, i, m);
    if (r >= 0) return r;
  }
  if (i->kind == KIND_PYTHON) return stop(s, m, RUN_EVENT);
  switch (((system_fn)i->fn)(s->M, s->w, s->f, i, m)) {
    case SYS_NEXT:
      s->M->lanes[s->f->pc] += (u64)__builtin_popcount(m);
      return go_on(s);
    case SYS_BLOCK: return other_fragment(s);
    case SYS_PYTHON: return stop(s, m, RUN_EVENT);
    default: return stop(s, m, RUN_ERROR);
  }
}

EXPORT int core_run(machine *M, warp *w, i64 budget) {
  int going = 1, stay = (int)w->turn;
  slice s = {.M = M, .w = w, .f = pick(w), .careful = M->flags & FLAG_CAREFUL, .status = RUN_BUDGET};
  if (!s.f) return w->n_frags ? RUN_BLOCKED : RUN_EXITED;
  while (going && s.executed < budget) {
    if (w->n_frags > 1 && meet(w, &s.f) && !stay) {
      going = other_fragment(&s);
      continue;
    }
    const insn *i = M->insns + s.f->pc;
    u32 m = s.f->mask;
    if (i->guard >= 0) m &= i->guard_not ? ~w->pred[i->guard] : w->pred[i->guard];
    if (i->kind == KIND_LANE) going = lane_step(&s, i, m);
    else if (i->kind == KIND_BRANCH) going = branch_step(&s, i, m);
    else if (i->kind == KIND_EXIT) going = exit_step(&s, m);
    else if (!m || i->kind == KIND_NOP) going = go_on(&s);
    else going = system_step(&s, i, m);
  }
  if (s.status == RUN_BUDGET && w->n_frags > 1) w->turn = 1;
  w->executed += s.executed;
  M->instructions += s.executed;
  return s.status;
}

/* Python has executed the instruction of the last event: count it and go on behind it. */
EXPORT void core_advance(machine *M, warp *w, i32 fragment, u32 m) {
  frag *f = &w->frags[fragment];
  M->count[f->pc]++;
  M->lanes[f->pc] += (u64)__builtin_popcount(m);
  M->instructions++;
  w->executed++;
  f->wait = WAIT_NO;
  f->pc++;
}

/* Which warps can run: 0 blocked, 1 ready, 2 blocked in a wait that only Python can judge. */
EXPORT int core_poll(cta *c, u8 *out) {
  int any = 0;
  for (int k = 0; k < c->n_warps; k++) {
    const warp *w = &c->warps[k];
    out[k] = 0;
    for (int j = 0; j < w->n_frags; j++) {
      if (ready(w, &w->frags[j])) { out[k] = 1; any = 1; break; }
      if (w->frags[j].wait == WAIT_PYTHON) out[k] = 2, any |= 2;
    }
  }
  return any;
}

/* Nothing can run: suspended try_waits time out and answer false. Returns how many did. */
EXPORT int core_timeout(cta *c) {
  int n = 0;
  for (int k = 0; k < c->n_warps; k++)
    for (int j = 0; j < c->warps[k].n_frags; j++) {
      frag *f = &c->warps[k].frags[j];
      if (f->wait != WAIT_TRY) continue;
      f->wait = WAIT_NO;
      f->state = 1;
      n++;
    }
  return n;
}
