/* wgmma: asynchronous matrix products of a warpgroup.
 *
 * The instruction is collective: its n-th instance can take effect only when all four warps of the warpgroup have
 * issued their own. So wgmma.wait_group also orders the four warps among each other. (Treating the warps as
 * independent would report a race in kernels that stage their output over an operand, which hardware cannot have.)
 * Operations take effect when their group is committed or, in schedules that defer, when they are waited for. */
#include <stdlib.h>

#include "tensor.h"

enum { OUTSTANDING = 512 /* operations of one warp between issue and wait */, GROUPS = 128, K_MOST = 512 };
enum { NEGATE = 1, A_MN = 2, B_MN = 4, A_REGS = 8 };

/* Operand list of the instruction, built by decode/wgmma.py. */
typedef struct operation {
  u32 n, k, d_format, a_format, b_format, flags, n_d, n_a;
  u32 rows[]; /* n_d accumulator rows, then n_a rows of A */
} operation;

typedef struct issue {
  const insn *i;
  u64 a, b;
  u32 accumulate;
  i32 agent, clock;
} issue;

struct warpgroup {
  issue queue[4][OUTSTANDING]; /* by operation number modulo OUTSTANDING */
  u32 issued[4], released[4];
  u32 complete; /* issued by all four warps: waits watch this word */
  u32 executed;
  u32 marks[4][GROUPS], first_mark[4], n_marks[4];
  i32 agent[4];
};

static const operation *operation_of(const machine *M, const insn *i) {
  return (const operation *)(M->lists + i->list);
}
static issue *issue_at(struct warpgroup *g, int w, u32 number) { return &g->queue[w][number % OUTSTANDING]; }

static struct warpgroup *group_of(warp *w) {
  cta *c = w->cta;
  if (!c->groups) c->groups = calloc((size_t)(c->n_warps + 3) / 4, sizeof *c->groups);
  if (!c->groups[w->id / 4]) c->groups[w->id / 4] = calloc(1, sizeof(struct warpgroup));
  return c->groups[w->id / 4];
}

static int bytes_of(u32 format) { return format == FMT_TF32 ? 4 : format == FMT_F16 || format == FMT_BF16 ? 2 : 1; }

static operand operand_of(const operation *o, u64 descriptor, int is_a) {
  u32 fmt = is_a ? o->a_format : o->b_format;
  int mn = o->flags & (is_a ? A_MN : B_MN);
  return (operand){descriptor, is_a ? 64 : o->n, (u32)(o->k * (u32)bytes_of(fmt)), !mn, bytes_of(fmt) * 2, 0, fmt};
}

/* ------------------------------------------------------------------ detectors at issue */
static void own(warp *w, const u32 *rows, u32 n, u8 busy) {
  for (u32 k = 0; k < n; k++) {
    u32 s = rows[k] / 64;
    w->n_busy += w->busy[s] == BUSY_NO;
    w->busy[s] = busy;
  }
}

static int check_issue(machine *M, warp *w, struct warpgroup *g, issue *s) {
  const operation *o = operation_of(M, s->i);
  own(w, o->rows, o->n_d, BUSY_WRITTEN);
  own(w, o->rows + o->n_d, o->n_a, BUSY_READ);
  if (!(M->flags & FLAG_CAREFUL)) return 0;
  /* PTX ISA, "wgmma.fence": required before the first wgmma and whenever other instructions accessed the registers. */
  if (!w->wgmma_fences) return fail(M, w, s->i, ERR_WGMMA_FENCE, -1, o->rows[0] / 64, 1);
  for (u32 k = 0; k < o->n_d + o->n_a; k++)
    if (w->touched[o->rows[k] / 64] & (k < o->n_d ? TOUCHED_WRITTEN | TOUCHED_READ : TOUCHED_WRITTEN))
      return fail(M, w, s->i, ERR_WGMMA_FENCE, -1, o->rows[k] / 64, 0);
  if (M->flags & FLAG_STRICT) for (u32 k = 0; k < o->n_d; k++) w->written[o->rows[k] / 64] = FULL;
  if (!M->cap) return 0;
  int n = w->id % 4;
  if (!g->agent[n]) {
    if (w->cta->cluster->n_agents >= M->cap) return fail(M, w, s->i, ERR_AGENTS, -1, 0, 0);
    g->agent[n] = w->cta->cluster->n_agents++;
  }
  s->agent = g->agent[n];
  s->clock = (i32)g->issued[n] + 1;
  i32 *stamp = malloc(2 * (size_t)M->cap * sizeof *stamp);
  memcpy(stamp, w->vc, 2 * (size_t)M->cap * sizeof *stamp);
  stamp[s->agent] = s->clock;
  i32 index[CHUNKS_MOST], pc = (i32)(s->i - M->insns);
  operand b = operand_of(o, s->b, 0);
  i32 count = chunk_numbers(&b, index);
  if (count < 0) { free(stamp); return fail(M, w, s->i, ERR_DESCRIPTOR, -1, s->b, 0); }
  core_shadow_chunks(M, w->cta, index, count, TOUCH_ASYNC, s->agent, s->clock, stamp, pc);
  if (!(o->flags & A_REGS)) {
    operand a = operand_of(o, s->a, 1);
    count = chunk_numbers(&a, index);
    if (count < 0) { free(stamp); return fail(M, w, s->i, ERR_DESCRIPTOR, -1, s->a, 0); }
    int quarter = o->flags & A_MN ? 0 : count / 4; /* K-major rows belong to one warp each; MN-major chunks to all */
    core_shadow_chunks(M, w->cta, index + quarter * n, quarter ? quarter : count, TOUCH_ASYNC, s->agent, s->clock,
                       stamp, pc);
  }
  free(stamp);
  return 0;
}

/* Fields of the instruction:
 *     lists  operation                       o[1], o[2]  descriptor rows of a and b
 *     o[3]   predicate of scale-d or none    imm         its constant value, or 2 when the predicate is negated */
EXPORT int sys_wgmma(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  if (w->live & ~f->mask) { f->wait = WAIT_CONVERGE; f->want = FULL; return SYS_BLOCK; }
  struct warpgroup *g = group_of(w);
  const operation *o = operation_of(M, i);
  int n = w->id % 4, lane = first_lane(m);
  if (g->issued[n] - g->executed >= OUTSTANDING || (w->id | 3) >= w->cta->n_warps)
    return fail(M, w, i, ERR_WGMMA_GROUP, -1, g->issued[n] - g->executed, 0);
  issue *s = issue_at(g, n, g->issued[n]);
  *s = (issue){.i = i, .b = WROW(u64, i->o[2])[lane], .a = o->flags & A_REGS ? 0 : WROW(u64, i->o[1])[lane]};
  s->accumulate = i->o[3] == NONE ? (u32)(i->imm & 1) : (w->pred[i->o[3]] >> lane & 1) ^ (u32)(i->imm >> 1 & 1);
  if (check_issue(M, w, g, s)) return SYS_ERROR;
  g->issued[n]++;
  u32 least = g->issued[0];
  for (int k = 1; k < 4; k++) if ((i32)(g->issued[k] - least) < 0) least = g->issued[k];
  g->complete = least;
  if (!n) M->matrix_flops += 2ull * 64 * o->n * o->k;
  M->progress++;
  return SYS_NEXT;
}

/* ------------------------------------------------------------------ execution */
static int joins(const operation *a, const operation *b) {
  return a->d_format == FMT_F32 && a->n == b->n && a->a_format == b->a_format && a->b_format == b->b_format &&
         a->flags == b->flags && a->n_d == b->n_d && !memcmp(a->rows, b->rows, 4 * a->n_d);
}

static int agree(machine *M, warp *w, struct warpgroup *g, u32 number) {
  const issue *s = issue_at(g, 0, number);
  for (int k = 1; k < 4; k++) {
    const issue *t = issue_at(g, k, number);
    if (t->i != s->i || t->a != s->a || t->b != s->b || t->accumulate != s->accumulate)
      return fail(M, w, s->i, ERR_WGMMA_DISAGREE, -1, (u64)(t->i - M->insns), 0);
  }
  return 0;
}

static int gather(machine *M, warp *w, const issue *s, const operand *x, f32 *out, i32 stride, int transpose) {
  i32 index[CHUNKS_MOST], count = chunk_numbers(x, index);
  cta *c = w->cta;
  if (count < 0) return fail(M, w, s->i, ERR_DESCRIPTOR, -1, x->descriptor, 0);
  for (i32 k = 0; k < count; k++) {
    if ((u32)index[k] * 16 + 16 > c->smem_size || index[k] * 16 < SMEM_BASE)
      return fail(M, w, s->i, ERR_SHARED, -1, (u64)index[k] * 16, c->smem_size);
    if (c->init && memchr(c->init + 16 * index[k], 0, 16))
      return fail(M, w, s->i, ERR_UNINIT_SHARED, -1, (u64)index[k] * 16, 0);
  }
  i32 rows = (i32)(x->k_major ? x->mn : x->k_bytes * 2 / x->half_bytes);
  core_gather(c->smem, index, rows, count / rows, (i32)x->format, 0, out, stride, transpose);
  return 0;
}

static int multiply(machine *M, warp *w, struct warpgroup *g, u32 first, u32 count) {
  warp *warps = w->cta->warps + (w->id & ~3);
  const operation *o = operation_of(M, issue_at(g, 0, first)->i);
  i32 n = (i32)o->n, k_total = (i32)(o->k * count), at = 0;
  f32 *left = scratch(M, SCRATCH_A, 64 * K_MOST * sizeof *left);
  f32 *right = scratch(M, SCRATCH_B, 256 * K_MOST * sizeof *right);
  f32 *acc = scratch(M, SCRATCH_D, 64 * 256 * sizeof *acc);
  for (u32 q = 0; q < count; q++, at += (i32)o->k) {
    const issue *s = issue_at(g, 0, first + q);
    const operation *p = operation_of(M, s->i);
    operand b = operand_of(p, s->b, 0);
    if (gather(M, w, s, &b, right + (size_t)at * (size_t)n, n, !(p->flags & B_MN))) return SYS_ERROR;
    if (p->flags & A_REGS) {
      for (int k = 0; k < 4; k++)
        core_load_a(warps[k].file, p->rows + p->n_d, (i32)p->n_a, (i32)p->a_format, left + 16 * k * k_total + at,
                    k_total);
    } else {
      operand a = operand_of(p, s->a, 1);
      if (gather(M, w, s, &a, left + at, k_total, (p->flags & A_MN) != 0)) return SYS_ERROR;
    }
  }
  if (o->flags & NEGATE) for (i32 k = 0; k < 64 * k_total; k++) left[k] = -left[k];
  int keep = (int)issue_at(g, 0, first)->accumulate;
  memset(acc, 0, 64 * (size_t)n * sizeof *acc);
  if (o->d_format == FMT_S32) { /* exact: the sum of 32 products of 8-bit integers is below 2^24 */
    i32 *total = scratch(M, SCRATCH_TOTAL, 64 * 256 * sizeof *total);
    memset(total, 0, 64 * 256 * sizeof *total);
    if (keep)
      for (int k = 0; k < 4; k++) core_load_accumulators(warps[k].file, o->rows, n, (f32 *)total + 16 * k * n, n);
    core_gemm(acc, left, right, 64, n, k_total, k_total, n, n);
    for (i32 k = 0; k < 64 * n; k++) total[k] += (i32)acc[k];
    for (int k = 0; k < 4; k++) core_store_accumulators(warps[k].file, o->rows, n, (f32 *)total + 16 * k * n, n);
    return 0;
  }
  int half = o->d_format == FMT_F16;
  for (int k = 0; k < 4 && keep; k++)
    (half ? core_load_accumulators_f16 : core_load_accumulators)(warps[k].file, o->rows, n, acc + 16 * k * n, n);
  matrix_product(M, acc, left, right, 64, n, k_total, (i32)o->k, o->a_format, UNIT_WGMMA);
  for (int k = 0; k < 4; k++)
    (half ? core_store_accumulators_f16 : core_store_accumulators)(warps[k].file, o->rows, n, acc + 16 * k * n, n);
  return 0;
}

/* Runs the warpgroup's operations in order as far as `upto`, several of one accumulation at a time. */
static int execute(machine *M, warp *w, struct warpgroup *g, u32 upto) {
  while ((i32)(upto - g->executed) > 0) {
    u32 first = g->executed, count = 1;
    if (agree(M, w, g, first)) return SYS_ERROR;
    const operation *o = operation_of(M, issue_at(g, 0, first)->i);
    while (first + count != upto && (count + 1) * o->k <= K_MOST) {
      const issue *s = issue_at(g, 0, first + count);
      if (!s->accumulate || !joins(o, operation_of(M, s->i))) break;
      if (agree(M, w, g, first + count)) return SYS_ERROR;
      count++;
    }
    if (multiply(M, w, g, first, count)) return SYS_ERROR;
    g->executed += count;
  }
  return 0;
}

/* Whether a group waits for its wait_group instead of running when it is committed. */
static int defers(machine *M, const insn *i) {
  switch (M->schedule) {
    case SCHEDULE_EAGER: return 0;
    case SCHEDULE_LATE: return 1;
    case SCHEDULE_RANDOM:
      M->rng = M->rng * 6364136223846793005ull + 1442695040888963407ull;
      return (M->rng >> 33) % 10 >= 3;
    default: return (int)(((u64)(i - M->insns) * 0x9e3779b97f4a7c15ull ^ M->seed * 0xc2b2ae3d27d4eb4full) >> 40 & 1);
  }
}

EXPORT int sys_wgmma_fence(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f, (void)i, (void)m;
  w->wgmma_fences++;
  if (M->flags & FLAG_CAREFUL) memset(w->touched, 0, (size_t)M->n_slots);
  return SYS_NEXT;
}

EXPORT int sys_wgmma_commit(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f, (void)m;
  struct warpgroup *g = group_of(w);
  int n = w->id % 4;
  if (g->n_marks[n] == GROUPS) return fail(M, w, i, ERR_WGMMA_GROUP, -1, GROUPS, 1);
  g->marks[n][(g->first_mark[n] + g->n_marks[n]++) % GROUPS] = g->issued[n];
  if (defers(M, i)) return SYS_NEXT;
  u32 upto = g->complete; /* the operations of all four warps' committed groups */
  for (int k = 0; k < 4; k++) {
    u32 last = g->n_marks[k] ? g->marks[k][(g->first_mark[k] + g->n_marks[k] - 1) % GROUPS] : g->released[k];
    if ((i32)(last - upto) < 0) upto = last;
  }
  return execute(M, w, g, upto);
}

/* Operations before `last` are complete: their registers are free, and the warp knows of all four warps' reads. */
static void release(machine *M, warp *w, struct warpgroup *g, u32 last) {
  int n = w->id % 4;
  for (u32 k = g->released[n]; k != last; k++) {
    const operation *o = operation_of(M, issue_at(g, n, k)->i);
    for (u32 r = 0; r < o->n_d + o->n_a; r++) {
      u8 *busy = &w->busy[o->rows[r] / 64];
      w->n_busy -= *busy != BUSY_NO;
      *busy = BUSY_NO;
    }
  }
  for (u32 k = last; k != g->issued[n]; k++) {
    const operation *o = operation_of(M, issue_at(g, n, k)->i);
    own(w, o->rows, o->n_d, BUSY_WRITTEN);
    own(w, o->rows + o->n_d, o->n_a, BUSY_READ);
  }
  if (!M->cap) return;
  for (int k = 0; k < 4; k++)
    if (g->agent[k] && w->vc[g->agent[k]] < (i32)last) w->vc[g->agent[k]] = (i32)last;
}

/* imm: groups that may stay outstanding. */
EXPORT int sys_wgmma_wait(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  struct warpgroup *g = group_of(w);
  int n = w->id % 4;
  u32 last = g->released[n], done = 0;
  if ((i64)g->n_marks[n] > i->imm) {
    done = g->n_marks[n] - (u32)i->imm;
    last = g->marks[n][(g->first_mark[n] + done - 1) % GROUPS];
  }
  if ((i32)(g->complete - last) < 0) {
    M->blocked[i - M->insns] = 1;
    f->wait = WAIT_WORD;
    f->word = &g->complete;
    f->old = g->complete;
    f->info[0] = -2;
    return SYS_BLOCK;
  }
  if ((i32)(last - g->executed) > 0 && execute(M, w, g, last)) return SYS_ERROR;
  release(M, w, g, last);
  g->released[n] = last;
  g->first_mark[n] += done;
  g->n_marks[n] -= done;
  M->progress++;
  return SYS_NEXT;
}

/* An accumulator in flight is moved: its operations run now, or the warp waits until its warpgroup has issued them. */
int wgmma_settle(machine *M, warp *w, frag *f) {
  struct warpgroup *g = group_of(w);
  if ((i32)(g->complete - g->issued[w->id % 4]) < 0) {
    f->wait = WAIT_WORD;
    f->word = &g->complete;
    f->old = g->complete;
    f->info[0] = -2;
    return SYS_BLOCK;
  }
  if (execute(M, w, g, g->complete)) return SYS_ERROR;
  for (int s = 0; s < M->n_slots; s++)
    if (w->busy[s] == BUSY_WRITTEN || w->busy[s] == BUSY_READ) w->busy[s] = BUSY_NO, w->n_busy--;
  return SYS_NEXT;
}

/* Operations a warp has issued and that have not run; asked when it exits. */
EXPORT i32 core_wgmma_outstanding(const warp *w) {
  struct warpgroup *g = w->cta->groups ? w->cta->groups[w->id / 4] : NULL;
  return g ? (i32)(g->issued[w->id % 4] - g->executed) : 0;
}

void wgmma_free(cta *c) {
  if (!c->groups) return;
  for (int k = 0; k < (c->n_warps + 3) / 4; k++) free(c->groups[k]);
  free(c->groups);
}
