/* The tensor-copy engine: boxes of a strided global tensor to and from swizzled shared memory. */
#include <stdlib.h>

#include "numbers.h"

typedef struct tensor_map {
  u64 address;
  u64 stride[5];       /* bytes; stride[0] is the element size */
  u32 dim[5], box[5], step[5];
  u32 rank, swizzle;   /* swizzle: XOR mask on 16-byte chunk numbers */
  u32 fill;            /* half word that fills what is outside the tensor; elements have whole ones unless it is 0 */
  u32 type;            /* element type, for reductions (AF_* of memory.c) */
  u32 units, unit_bytes; /* sub-byte elements come in units: `units` elements in `unit_bytes`; otherwise 1 element */
  u32 expand;          /* 0, or bytes of global memory (8 or 12) that fill one 16-byte chunk of shared memory */
} tensor_map;

u64 atomic_value(int op, int format, u64 x, u64 b, u64 c);

/* A box is a list of rows (dimension 0); row r starts at these coordinates in dimensions 1.. */
static i64 rows_of(const tensor_map *t) {
  i64 n = 1;
  for (u32 k = 1; k < t->rank; k++) n *= (t->box[k] + t->step[k] - 1) / t->step[k];
  return n;
}

/* Global address of row r, or 0 with *inside = 0 when a coordinate leaves the tensor. */
static u64 row_address(const tensor_map *t, const i32 *at, i64 r, int *inside) {
  u64 a = t->address;
  *inside = 1;
  for (u32 k = 1; k < t->rank; k++) {
    i64 n = (t->box[k] + t->step[k] - 1) / t->step[k], x = at[k] + (r % n) * t->step[k];
    r /= n;
    if (x < 0 || x >= t->dim[k]) { *inside = 0; return 0; }
    a += (u64)x * t->stride[k];
  }
  return a;
}

/* Window of dimension 0, in bytes of one row: [*lo, *hi) lies inside the tensor and starts at byte *start of its
 * row. */
static i64 row_window(const tensor_map *t, const i32 *at, i64 *lo, i64 *hi, i64 *start) {
  i64 es = (i64)t->unit_bytes, c = at[0] / (i64)t->units, box = t->box[0] / t->units, dim = t->dim[0] / t->units;
  *lo = c < 0 ? -c * es : 0;
  *hi = (c + box > dim ? dim - c : box) * es;
  *start = c * es;
  return box * es;
}

/* Bytes of shared memory that a box fills. */
EXPORT i64 core_tma_bytes(const tensor_map *t) {
  i64 row = (i64)(t->box[0] / t->units * t->unit_bytes);
  if (t->expand) row = row / t->expand * 16;
  return row * rows_of(t);
}

/* Bytes that a load of n bytes of shared memory counts on its mbarrier: the packed size of expanded types. Shipped
 * CUTLASS kernels with ALIGN16B operands announce this size. */
EXPORT i64 core_tma_transaction(const tensor_map *t, i64 n) { return t->expand ? n / 16 * t->expand : n; }

static int illegal(machine *M, warp *w, i32 pc, u64 address, u64 n) {
  return fail(M, w, M->insns + pc, ERR_GLOBAL, -1, address, n);
}

static void fill_outside(const tensor_map *t, u8 *out, i64 bytes) {
  if (!t->fill) memset(out, 0, (size_t)bytes);
  else for (i64 k = 0; k < bytes; k += 2) memcpy(out + k, &t->fill, 2);
}

/* Global box -> linear bytes. */
EXPORT int core_tma_gather(machine *M, warp *w, i32 pc, const tensor_map *t, const i32 *at, u8 *out, const i32 *vc,
                           i32 agent, i32 clock) {
  i64 lo, hi, start, bytes = row_window(t, at, &lo, &hi, &start), n = rows_of(t);
  for (i64 r = 0; r < n; r++, out += bytes) {
    int inside;
    u64 a = row_address(t, at, r, &inside);
    if (!inside || lo >= hi) { fill_outside(t, out, bytes); continue; }
    fill_outside(t, out, lo);
    fill_outside(t, out + hi, bytes - hi);
    a += (u64)(start + lo);
    region *g = region_find(M, a, a + (u64)(hi - lo));
    if (!g) return illegal(M, w, pc, a, (u64)(hi - lo));
    memcpy(out + lo, g->host + (a - g->base), (size_t)(hi - lo));
    if (g->flags & REGION_FRESH && M->flags & FLAG_UNINIT_GLOBAL
        && memchr(g->written + (a - g->base), 0, (size_t)(hi - lo)))
      return fail(M, w, M->insns + pc, ERR_UNINIT_GLOBAL, -1, a, (u64)(hi - lo));
    if (vc && g->shadow) core_global_touch(M, w, a, (u32)(hi - lo), 0, pc, agent, clock, vc);
  }
  return 0;
}

/* Linear bytes -> global box. reduce: -1 plain store, otherwise an AT_* operation. */
EXPORT int core_tma_scatter(machine *M, warp *w, i32 pc, const tensor_map *t, const i32 *at, const u8 *in, i32 reduce,
                            const i32 *vc, i32 agent, i32 clock) {
  static const u32 size_of[] = {4, 4, 8, 8, 4, 8, 4, 4, 2, 2};
  i64 lo, hi, start, bytes = row_window(t, at, &lo, &hi, &start), n = rows_of(t);
  for (i64 r = 0; r < n; r++, in += bytes) {
    int inside;
    u64 a = row_address(t, at, r, &inside);
    if (!inside || lo >= hi) continue;
    a += (u64)(start + lo);
    u64 len = (u64)(hi - lo);
    region *g = region_find(M, a, a + len);
    if (!g) return illegal(M, w, pc, a, len);
    if (g->flags & REGION_READONLY) return fail(M, w, M->insns + pc, ERR_READONLY, -1, a, len);
    u8 *d = g->host + (a - g->base);
    g->stores++;
    if (g->written) memset(g->written + (a - g->base), 1, len);
    if (vc && reduce < 0) core_global_touch(M, w, a, (u32)len, 1, pc, agent, clock, vc);
    if (reduce < 0) { memcpy(d, in + lo, len); continue; }
    u32 es = size_of[t->type];
    for (u64 k = 0; k < len; k += es) {
      u64 x = 0, y = 0;
      memcpy(&x, d + k, es), memcpy(&y, in + lo + k, es);
      x = atomic_value(reduce, (int)t->type, x, y, 0);
      memcpy(d + k, &x, es);
    }
  }
  M->progress++;
  return 0;
}

/* Swizzle: within its atom a 16-byte chunk's number is XORed with the number of its 128-byte line. The XOR acts on
 * absolute shared-memory address bits. So a box that starts inside an atom lands where the matrix descriptors look for
 * it. */
static inline u32 chunk_of(u32 k, u32 swizzle) { return k ^ (k >> 3 & swizzle); }

/* PTX ISA, "cp.async.bulk.tensor": the shared-memory side is 128-byte aligned; a plain bulk copy needs 16 bytes. */
static int shared_range(machine *M, warp *w, i32 pc, cta *c, u32 offset, i64 n, u32 align) {
  if (offset & (align - 1)) return fail(M, w, M->insns + pc, ERR_MISALIGNED, -1, offset, align);
  if (offset < SMEM_BASE || offset + n > c->smem_size)
    return fail(M, w, M->insns + pc, ERR_SHARED, -1, offset, c->smem_size);
  return 0;
}

EXPORT int core_smem_write(machine *M, warp *w, i32 pc, cta *c, u32 offset, u32 swizzle, const u8 *in, i64 n,
                           u32 expand, u32 align) {
  if (shared_range(M, w, pc, c, offset, n, align)) return SYS_ERROR;
  for (i64 k = 0; k < n / 16; k++) {
    u32 chunk = chunk_of(offset / 16 + (u32)k, swizzle);
    if (expand) {
      memcpy(c->smem + 16 * (size_t)chunk, in + expand * k, expand);
      memset(c->smem + 16 * (size_t)chunk + expand, 0, 16 - expand);
    } else {
      memcpy(c->smem + 16 * (size_t)chunk, in + 16 * k, 16);
    }
    if (c->init) memset(c->init + 16 * (size_t)chunk, 1, 16);
    for (u32 b = 2 * chunk; b < 2 * chunk + 2; b++)
      if (c->mbar_slot[b] && c->mbars[c->mbar_slot[b] - 1].alive)
        return fail(M, w, M->insns + pc, ERR_MBAR_MEMORY, -1, 8 * (u64)b, 0);
  }
  M->progress++;
  return 0;
}
EXPORT int core_smem_read(machine *M, warp *w, i32 pc, cta *c, u32 offset, u32 swizzle, u8 *out, i64 n, u32 align) {
  if (shared_range(M, w, pc, c, offset, n, align)) return SYS_ERROR;
  for (i64 k = 0; k < n / 16; k++) {
    size_t at = 16 * (size_t)chunk_of(offset / 16 + (u32)k, swizzle);
    memcpy(out + 16 * k, c->smem + at, 16);
    if (c->init && memchr(c->init + at, 0, 16)) return fail(M, w, M->insns + pc, ERR_UNINIT_SHARED, -1, at, 0);
  }
  return 0;
}

/* Detector bookkeeping of a box in shared memory. */
EXPORT void core_shadow_box(machine *M, cta *c, u32 offset, u32 swizzle, i64 n, u32 touch_kind, i32 agent, i32 clock,
                            const i32 *vc, i32 pc) {
  for (i64 k = 0; k < n / 16; k++)
    core_shadow_bytes(M, c, 16 * chunk_of(offset / 16 + (u32)k, swizzle), 16, touch_kind, agent, clock, vc, pc);
}

/* cp.async.bulk.tensor loads of one CTA that complete at issue. Anything else, and a descriptor that Python has not
 * decoded yet, goes to Python. lists: map, shared and barrier operands (row, offset, wide), then coordinate rows; vec:
 * rank. */
static int load_box(machine *M, warp *w, i32 pc, const tensor_map *t, const i32 *at, u32 shared, u32 bar, u32 lane) {
  u8 *buffer = scratch(M, SCRATCH_BOX, 1 << 18);
  cta *c = shared_cta(M, w, M->insns + pc, shared, -1), *owner;
  mbarrier *b = mbar_find(M, w, M->insns + pc, bar, &owner);
  if (!c || !b) return SYS_ERROR;
  if (c->exited) return fail(M, w, M->insns + pc, ERR_TMA_EXITED, -1, shared, 0);
  i64 n = core_tma_bytes(t);
  i32 clock = 0;
  const i32 *vc = NULL;
  if (M->cap) { /* the load happens after its issue and before the phase that its bytes complete */
    i32 *stamp = scratch(M, SCRATCH_STAMP, SHARED_PARTS * (size_t)M->cap * sizeof *stamp);
    memcpy(stamp, w->vc, SHARED_PARTS * (size_t)M->cap * sizeof *stamp);
    core_clock_cut(M, w, 1u << lane, stamp);
    clock_join(b->vc, stamp, SHARED_PARTS * M->cap);
    clock = stamp[b->agent] = (i32)b->phase + 1;
    vc = stamp;
    incoming(M, w, c, b->agent, clock, pc);
    incoming(M, w, owner, b->agent, clock, pc);
    core_shadow_box(M, c, shared & OFFSET_MASK, t->swizzle, n, TOUCH_WRITE | TOUCH_ASYNC, b->agent, clock, vc, pc);
  }
  if (core_tma_gather(M, w, pc, t, at, buffer, vc, b->agent, clock)) return SYS_ERROR;
  if (core_smem_write(M, w, pc, c, shared & OFFSET_MASK, t->swizzle, buffer, n, t->expand, 128)) return SYS_ERROR;
  M->tma_load_bytes += (u64)n;
  return core_complete_tx(M, w, pc, bar, core_tma_transaction(t, n));
}

EXPORT int sys_tma_load(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  const u32 *words = M->lists + i->list;
  const address_operand *map = (const address_operand *)words, *shared = map + 1, *bar = map + 2;
  const u32 *coords = words + 9;
  if (M->schedule != SCHEDULE_EAGER) return SYS_PYTHON;
  u64 a = operand_address(w, map, first_lane(m));
  if (a >> WINDOW_SHIFT != 4 || a & 63) return SYS_PYTHON;
  const tensor_map *t = M->maps[(a & FULL) / 64];
  if (!t) return SYS_PYTHON;
  /* An illegal instruction on an H200, where it is found out when it is executed. */
  if (i->vec != t->rank) return fail(M, w, i, ERR_TMA_RANK, first_lane(m), i->vec, t->rank);
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    if (operand_address(w, map, l) != a) return SYS_PYTHON;
  }
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    i32 at[5] = {0};
    for (u32 k = 0; k < i->vec; k++) at[k] = (i32)WROW(u32, coords[k])[l];
    u32 to = (u32)operand_address(w, shared, l), signal = (u32)operand_address(w, bar, l);
    if (load_box(M, w, (i32)(i - M->insns), t, at, to, signal, (u32)l)) return SYS_ERROR;
  }
  return SYS_NEXT;
}

/* Plain bulk copies. */
EXPORT int core_bulk_read(machine *M, warp *w, i32 pc, u64 address, u8 *out, i64 n, const i32 *vc, i32 agent,
                          i32 clock) {
  region *g = region_find(M, address, address + (u64)n);
  if (!g) return illegal(M, w, pc, address, (u64)n);
  memcpy(out, g->host + (address - g->base), (size_t)n);
  if (vc && g->shadow) core_global_touch(M, w, address, (u32)n, 0, pc, agent, clock, vc);
  return 0;
}
EXPORT int core_bulk_write(machine *M, warp *w, i32 pc, u64 address, const u8 *in, i64 n, i32 reduce, i32 type,
                           const i32 *vc, i32 agent, i32 clock) {
  tensor_map t = {.address = address, .stride = {1}, .dim = {(u32)n}, .box = {(u32)n}, .step = {1}, .rank = 1,
                  .type = (u32)type, .units = 1, .unit_bytes = 1};
  i32 at[5] = {0};
  return core_tma_scatter(M, w, pc, &t, at, in, reduce, vc, agent, clock);
}
