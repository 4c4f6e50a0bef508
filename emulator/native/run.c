/* The run loop: executes one warp until it blocks, exits, uses up its time slice or needs Python.
 *
 * Divergence: a warp is a list of fragments (program counter, lanes). The runnable fragment with the lowest program counter
 * runs, and fragments that meet at one program counter merge. Compilers place reconvergence points after the divergent
 * blocks, so this gives the convergence that .aligned and .sync instructions rely on. */
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
  /* Compilers move register initialisation past wgmma.fence, an asm statement that names no registers: moves hand on what
   * they copy, and constants count as untouched. */
  u8 touched = is_move ? 0 : TOUCHED_WRITTEN;
  u32 origin = 0;
  for (u32 k = 0; k < i->n_use; k++) {
    if (row_kind(refs[k]) == ROW_PRED) continue;
    u32 s = row_slot(refs[k]);
    if (w->n_busy && w->busy[s]) {
      if (w->busy[s] == BUSY_LOAD) return RUN_SCOREBOARD;
      /* Moves of accumulators in flight come from loops whose values the compiler keeps apart: in hardware there is no move. */
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

/* Joins every fragment at f's program counter into f, which starts that instruction afresh. Returns 1 if another runnable
 * fragment is behind f. */
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

EXPORT int core_run(machine *M, warp *w, i64 budget) {
  const insn *code = M->insns;
  const u32 careful = M->flags & FLAG_CAREFUL;
  i64 executed = 0;
  int status = RUN_BUDGET, stay = (int)w->turn;
  frag *f = pick(w);
  if (!f) return w->n_frags ? RUN_BLOCKED : RUN_EXITED;
  while (executed < budget) {
    if (w->n_frags > 1 && meet(w, &f) && !stay) {
      f = pick(w);
      if (!f) { status = RUN_BLOCKED; break; }
      continue;
    }
    const insn *i = code + f->pc;
    u32 m = f->mask;
    if (i->guard >= 0) m &= i->guard_not ? ~w->pred[i->guard] : w->pred[i->guard];
    if (i->kind == KIND_LANE) {
      if (m) {
        if (careful | w->n_busy) {
          int r = check_registers(M, w, i, m);
          if (r == RUN_SETTLE) {
            r = wgmma_settle(M, w, f);
            if (r == SYS_NEXT) continue;
            if (r == SYS_ERROR) { status = RUN_ERROR; break; }
            f = pick(w);
            if (!f) { status = RUN_BLOCKED; break; }
            continue;
          }
          if (r >= 0) { status = r == RUN_ERROR ? r : event(M, w, f, m, r); break; }
        }
        if (m == FULL) ((lane_fn)i->fn)(w->file, w->pred, i);
        else masked(M, w, i, m);
        M->lanes[f->pc] += (u64)__builtin_popcount(m);
      }
      M->count[f->pc]++;
      executed++;
      f->pc++;
      continue;
    }
    if (i->kind == KIND_BRANCH) {
      M->count[f->pc]++;
      executed++;
      if (i->target <= f->pc) executed += 4; /* loops use up the slice sooner: fairness between polling warps */
      if (m == f->mask) {
        f->pc = i->target;
      } else if (!m) {
        f->pc++;
      } else {
        frag *g = &w->frags[w->n_frags++];
        *g = (frag){.pc = i->target, .mask = m};
        f->mask &= ~m;
        f->pc++;
      }
      continue;
    }
    if (!m && i->kind != KIND_EXIT) { M->count[f->pc]++; executed++; f->pc++; continue; }
    if (i->kind == KIND_EXIT) {
      M->count[f->pc]++;
      executed++;
      int all = m == f->mask;
      if (!all) f->pc++;
      if (m) retire(M, w, f, m);
      if (!w->live) { status = RUN_EXITED; break; }
      if (all) {
        f = pick(w);
        if (!f) { status = RUN_BLOCKED; break; }
      }
      continue;
    }
    if (i->kind == KIND_NOP) { M->count[f->pc]++; executed++; f->pc++; continue; }
    if (careful | w->n_busy) {
      int r = check_registers(M, w, i, m);
      if (r >= 0) { status = r == RUN_ERROR ? r : event(M, w, f, m, r); break; }
    }
    if (i->kind == KIND_PYTHON) { status = event(M, w, f, m, RUN_EVENT); break; }
    int r = ((system_fn)i->fn)(M, w, f, i, m);
    if (r == SYS_NEXT) {
      M->count[f->pc]++;
      M->lanes[f->pc] += (u64)__builtin_popcount(m);
      executed++;
      f->pc++;
      continue;
    }
    if (r == SYS_BLOCK) {
      f = pick(w);
      if (!f) { status = RUN_BLOCKED; break; }
      continue;
    }
    status = r == SYS_PYTHON ? event(M, w, f, m, RUN_EVENT) : RUN_ERROR;
    break;
  }
  if (status == RUN_BUDGET && w->n_frags > 1) w->turn = 1;
  w->executed += executed;
  M->instructions += executed;
  return status;
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
