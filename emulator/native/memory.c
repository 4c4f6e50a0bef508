/* Loads, stores and atomics of every state space, with bounds, alignment and initialisation checks. */
#include "numbers.h"

int fail(machine *M, warp *w, const insn *i, int code, int lane, u64 address, u64 extra) {
  fault *e = &M->err;
  if (e->code) return SYS_ERROR;
  e->code = code;
  e->pc = i ? (i32)(i - M->insns) : -1;
  e->warp = w ? w->id : -1;
  e->lane = lane;
  e->address = address;
  e->extra = extra;
  if (w) {
    memcpy(e->cta, w->cta->id, sizeof e->cta);
    e->rank = (i32)w->cta->rank;
  }
  return SYS_ERROR;
}

/* Regions are sorted and disjoint; the last hit is tried first. */
region *region_find(machine *M, u64 lo, u64 hi) {
  region *r = &M->regions[M->last_region];
  if (M->n_regions && r->base <= lo && hi <= r->base + r->size) return r;
  i32 a = 0, b = M->n_regions;
  while (a < b) {
    i32 k = (a + b) / 2;
    if (M->regions[k].base <= lo) a = k + 1; else b = k;
  }
  if (!a) return NULL;
  r = &M->regions[a - 1];
  if (hi > r->base + r->size) return NULL;
  M->last_region = a - 1;
  return r;
}

EXPORT u8 *core_host_pointer(machine *M, u64 lo, u64 hi) {
  region *r = region_find(M, lo, hi);
  return r ? r->host + (lo - r->base) : NULL;
}

cta *shared_cta(machine *M, warp *w, const insn *i, u32 address, int lane) {
  cluster *k = w->cta->cluster;
  u32 rank = address >> RANK_SHIFT;
  if (rank < k->n_ctas) return k->ctas[rank];
  fail(M, w, i, ERR_RANK, lane, address, rank);
  return NULL;
}

/* Byte addresses of the active lanes; `space` is refined when the access is generic. */
static int addresses(machine *M, warp *w, const insn *i, u32 m, u64 *out, int *space) {
  if (i->aux & AUX_ADDR64) {
    const u64 *a = WROW(u64, i->o[1]);
    for (int l = 0; l < LANES; l++) out[l] = a[l] + (u64)i->imm;
  } else {
    const u32 *a = WROW(u32, i->o[1]);
    for (int l = 0; l < LANES; l++) out[l] = (u32)(a[l] + (u32)i->imm);
  }
  *space = i->space;
  if (*space != SPACE_GENERIC) {
    if (*space == SPACE_SHARED) for (int l = 0; l < LANES; l++) out[l] &= FULL;
    return 0;
  }
  u64 window = out[first_lane(m)] >> WINDOW_SHIFT;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    if (out[l] >> WINDOW_SHIFT != window) return fail(M, w, i, ERR_MIXED_SPACE, l, out[l], 0);
    if (window) out[l] &= FULL;
  }
  *space = window == 0 ? SPACE_GLOBAL : window == 1 ? SPACE_SHARED : window == 2 ? SPACE_LOCAL : SPACE_PARAM;
  return 0;
}

/* Shared-memory wavefronts of one access: lanes go in groups that fill 128 bytes. Within a group each of the 32 banks,
 * 4 bytes wide, serves one word at a time; equal words are broadcast. CUDA programming guide, "shared memory". */
static void count_banks(machine *M, const insn *i, u32 m, const u64 *address, u32 bytes) {
  int group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  u64 passes = 0, ideal = 0;
  for (int first = 0; first < LANES; first += group) {
    u32 words[32][32], n[32] = {0}, most = 0;
    for (int l = first; l < first + group; l++) {
      if (!(m >> l & 1)) continue;
      for (u32 b = 0; b < bytes; b += 4) {
        u32 word = (u32)(address[l] + b) >> 2, bank = word & 31, k = 0;
        while (k < n[bank] && words[bank][k] != word) k++;
        if (k == n[bank]) words[bank][n[bank]++] = word;
        if (n[bank] > most) most = n[bank];
      }
    }
    passes += most;
    ideal += most > 0;
  }
  M->bank_passes[i - M->insns] += passes;
  M->bank_ideal[i - M->insns] += ideal;
}

/* One lane's bytes in shared memory, after all checks. */
static u8 *shared_bytes(machine *M, warp *w, const insn *i, u64 address, u32 n, int lane, int write, cta **owner) {
  cta *c = shared_cta(M, w, i, (u32)address, lane);
  if (!c) return NULL;
  u32 offset = (u32)address & OFFSET_MASK;
  if (offset < SMEM_BASE || offset + n > c->smem_size) {
    fail(M, w, i, ERR_SHARED, lane, address, c->smem_size);
    return NULL;
  }
  if (offset & (n - 1)) { fail(M, w, i, ERR_MISALIGNED, lane, address, n); return NULL; }
  if (c != w->cta && c->exited) { fail(M, w, i, ERR_RANK, lane, address, 1ull << 32); return NULL; }
  if (c->init) {
    if (write) memset(c->init + offset, 1, n);
    else for (u32 b = 0; b < n; b++)
      if (!c->init[offset + b]) { fail(M, w, i, ERR_UNINIT_SHARED, lane, address + b, 0); return NULL; }
  }
  if (write && c->n_mbars) /* a store over a live mbarrier destroys it */
    for (u32 b = offset & ~7u; b < offset + n; b += 8)
      if (c->mbar_slot[b / 8] && c->mbars[c->mbar_slot[b / 8] - 1].alive) {
        fail(M, w, i, ERR_MBAR_MEMORY, lane, address, 0);
        return NULL;
      }
  *owner = c;
  return c->smem + offset;
}

/* write: 0 read, 1 write, 2 write of the bytes that are there already, which races with nothing that writes the
 * same. */
static u8 *global_bytes(machine *M, warp *w, const insn *i, u64 address, u32 n, int lane, int write) {
  region *r = region_find(M, address, address + n);
  if (!r) { fail(M, w, i, ERR_GLOBAL, lane, address, n); return NULL; }
  if (address & (n - 1)) { fail(M, w, i, ERR_MISALIGNED, lane, address, n); return NULL; }
  u64 at = address - r->base;
  if (write) {
    if (r->flags & REGION_READONLY) { fail(M, w, i, ERR_READONLY, lane, address, n); return NULL; }
    r->stores++;
    if (r->written) memset(r->written + at, 1, n);
  } else if (r->written && r->flags & REGION_FRESH && M->flags & FLAG_UNINIT_GLOBAL) {
    for (u32 b = 0; b < n; b++)
      if (!r->written[at + b]) { fail(M, w, i, ERR_UNINIT_GLOBAL, lane, address + b, n); return NULL; }
  }
  if (M->flags & FLAG_RACE) {
    if (i->aux & AUX_STRONG) global_order(M, w, address, lane, i);
    else global_touch(M, w, r, address, n, write, lane, i);
  }
  return r->host + at;
}

/* Record one lane's access to shared memory in the detectors. */
static void shared_access(machine *M, warp *w, cta *c, u32 offset, u32 n, u32 touch, int lane, const insn *i) {
  if (!(M->flags & (FLAG_RACE | FLAG_PROXY))) return;
  shadow_lanes(M, w, c, offset, n, touch | (i->aux & AUX_STRONG ? TOUCH_STRONG : 0), lane, i);
  if (M->flags & FLAG_RACE) shared_order(M, w, c, offset, lane, i);
}

static u8 *local_bytes(machine *M, warp *w, const insn *i, u64 address, u32 n, int lane) {
  u64 at = address & FULL;
  if (!w->local || at + n > (u64)M->local_bytes) { fail(M, w, i, ERR_LOCAL, lane, address, n); return NULL; }
  return w->local + (u64)lane * (u64)M->local_bytes + at;
}

static void widen(u8 *row, int lane, u32 row_bytes, const u8 *src, u32 size, int is_signed) {
  u64 x = 0;
  memcpy(&x, src, size < 8 ? size : 8);
  if (is_signed && size < row_bytes) x = (u64)((i64)(x << (64 - 8 * size)) >> (64 - 8 * size));
  if (size == 16) memcpy(row + 16 * lane, src, 16);
  else memcpy(row + row_bytes * (u32)lane, &x, row_bytes);
}

/* ld: lists holds (row offset, row bytes) per vector element. */
EXPORT int sys_ld(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  u64 at[LANES];
  int space;
  if (addresses(M, w, i, m, at, &space)) return SYS_ERROR;
  const u32 *dst = M->lists + i->list;
  u32 size = i->size, vec = i->vec, n = size * vec;
  if (space != SPACE_LOCAL) lanes_access(w, m);
  if (space == SPACE_SHARED && M->flags & FLAG_BANKS) count_banks(M, i, m, at, n);
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    const u8 *p = NULL;
    cta *c = NULL;
    if (space == SPACE_SHARED) {
      p = shared_bytes(M, w, i, at[l], n, l, 0, &c);
      if (p) shared_access(M, w, c, (u32)at[l] & OFFSET_MASK, n, 0, l, i);
    } else if (space == SPACE_GLOBAL) {
      p = global_bytes(M, w, i, at[l], n, l, 0);
    } else if (space == SPACE_LOCAL) {
      p = local_bytes(M, w, i, at[l], n, l);
    } else {
      if ((i64)at[l] + (i64)n > M->param_bytes) return fail(M, w, i, ERR_PARAM, l, at[l], n);
      p = M->param + at[l];
    }
    if (!p) return SYS_ERROR;
    for (u32 k = 0; k < vec; k++)
      if (dst[2 * k] != NONE) widen(w->file + dst[2 * k], l, dst[2 * k + 1], p + k * size, size, i->aux & AUX_SIGNED);
  }
  return SYS_NEXT;
}

EXPORT int sys_st(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  u64 at[LANES];
  int space;
  if (addresses(M, w, i, m, at, &space)) return SYS_ERROR;
  const u32 *src = M->lists + i->list;
  u32 size = i->size, vec = i->vec, n = size * vec;
  if (space != SPACE_LOCAL) lanes_access(w, m);
  if (space == SPACE_SHARED && M->flags & FLAG_BANKS) count_banks(M, i, m, at, n);
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u8 *p = NULL;
    cta *c = NULL;
    if (space == SPACE_SHARED) {
      p = shared_bytes(M, w, i, at[l], n, l, 1, &c);
      if (p) shared_access(M, w, c, (u32)at[l] & OFFSET_MASK, n, TOUCH_WRITE, l, i);
    } else if (space == SPACE_GLOBAL) {
      int same = 0;
      if (M->flags & FLAG_RACE) {
        const u8 *old = core_host_pointer(M, at[l], at[l] + n);
        same = old != NULL;
        for (u32 k = 0; k < vec && same; k++)
          same = !memcmp(old + k * size, w->file + src[2 * k] + src[2 * k + 1] * (u32)l, size);
      }
      p = global_bytes(M, w, i, at[l], n, l, 1 + same);
    } else if (space == SPACE_LOCAL) {
      p = local_bytes(M, w, i, at[l], n, l);
    } else {
      return fail(M, w, i, ERR_PARAM, l, at[l], n);
    }
    if (!p) return SYS_ERROR;
    for (u32 k = 0; k < vec; k++) memcpy(p + k * size, w->file + src[2 * k] + src[2 * k + 1] * (u32)l, size);
  }
  M->progress++;
  return SYS_NEXT;
}

/* Atomics. lists: destination rows (or none), then b, then c; o[0]: operation | format << 8. */
enum { AT_ADD, AT_MIN, AT_MAX, AT_AND, AT_OR, AT_XOR, AT_EXCH, AT_CAS, AT_INC, AT_DEC };
enum { AF_U32, AF_S32, AF_U64, AF_S64, AF_F32, AF_F64, AF_F16X2, AF_BF16X2, AF_F16, AF_BF16, AF_B128 };

static u64 combine_int(int op, u64 x, u64 b, u64 c, int is_signed, int bits) {
  i64 sx = bits == 32 ? (i32)x : (i64)x, sb = bits == 32 ? (i32)b : (i64)b;
  switch (op) {
    case AT_ADD: return x + b;
    case AT_MIN: return is_signed ? (sx < sb ? x : b) : x < b ? x : b;
    case AT_MAX: return is_signed ? (sx > sb ? x : b) : x > b ? x : b;
    case AT_AND: return x & b;
    case AT_OR: return x | b;
    case AT_XOR: return x ^ b;
    case AT_EXCH: return b;
    case AT_CAS: return x == b ? c : x;
    case AT_INC: return x >= b ? 0 : x + 1;
    default: return x == 0 || x > b ? b : x - 1;
  }
}
static f64 combine_float(int op, f64 x, f64 b) { return op == AT_ADD ? x + b : op == AT_MIN ? fmin(x, b) : fmax(x, b); }

u64 atomic_value(int op, int format, u64 x, u64 b, u64 c) {
  switch (format) {
    case AF_U32: case AF_S32: return (u32)combine_int(op, x, b, c, format == AF_S32, 32);
    case AF_U64: case AF_S64: return combine_int(op, x, b, c, format == AF_S64, 64);
    case AF_F32: return op == AT_EXCH ? b : bits_of(op == AT_ADD ? f32_of((u32)x) + f32_of((u32)b)
                                                    : (f32)combine_float(op, f32_of((u32)x), f32_of((u32)b)));
    case AF_F64: return bits_of64(combine_float(op, f64_of(x), f64_of(b)));
    case AF_F16: return f64_to_f16(combine_float(op, f16_to_f32((u16)x), f16_to_f32((u16)b)), ROUND_NEAREST, 0);
    case AF_BF16: return f64_to_bf16(combine_float(op, bf16_to_f32((u16)x), bf16_to_f32((u16)b)), ROUND_NEAREST, 0);
    default: {
      int one = format == AF_F16X2 ? AF_F16 : AF_BF16;
      return atomic_value(op, one, x & 0xffff, b & 0xffff, 0)
           | atomic_value(op, one, x >> 16 & 0xffff, b >> 16 & 0xffff, 0) << 16;
    }
  }
}

EXPORT int sys_atom(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  u64 at[LANES];
  int space, op = (int)i->o[0] & 255, format = (int)(i->o[0] >> 8);
  if (addresses(M, w, i, m, at, &space)) return SYS_ERROR;
  const u32 *rows = M->lists + i->list;
  u32 size = i->size, vec = i->vec;
  lanes_access(w, m);
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    cta *c = NULL;
    u8 *p;
    if (space == SPACE_SHARED) {
      p = shared_bytes(M, w, i, at[l], size * vec, l, 1, &c);
      if (p) shared_access(M, w, c, (u32)at[l] & OFFSET_MASK, size * vec, TOUCH_WRITE, l, i);
    } else if (space == SPACE_GLOBAL) {
      p = global_bytes(M, w, i, at[l], size * vec, l, 1);
    } else {
      return fail(M, w, i, ERR_UNSUPPORTED, l, at[l], 0);
    }
    if (!p) return SYS_ERROR;
    for (u32 k = 0; k < vec; k++) {
      const u32 *d = rows + 2 * k, *b = rows + 2 * (vec + k), *e = rows + 2 * (2 * vec + k);
      u64 x = 0, bv = 0, cv = 0;
      memcpy(&bv, w->file + b[0] + b[1] * (u32)l, size);
      if (op == AT_CAS) memcpy(&cv, w->file + e[0] + e[1] * (u32)l, size);
      /* Worker processes share global memory, so the update itself must be atomic on the host too. */
      if (size == 4) {
        u32 old = __atomic_load_n((u32 *)(p + 4 * k), __ATOMIC_SEQ_CST), now;
        do now = (u32)atomic_value(op, format, old, bv, cv);
        while (!__atomic_compare_exchange_n((u32 *)(p + 4 * k), &old, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        x = old;
      } else if (size == 8) {
        u64 old = __atomic_load_n((u64 *)(p + 8 * k), __ATOMIC_SEQ_CST), now;
        do now = atomic_value(op, format, old, bv, cv);
        while (!__atomic_compare_exchange_n((u64 *)(p + 8 * k), &old, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        x = old;
      } else {
        u16 old;
        memcpy(&old, p + 2 * k, 2);
        x = old;
        u16 now = (u16)atomic_value(op, format, x, bv, cv);
        memcpy(p + 2 * k, &now, 2);
      }
      if (d[0] != NONE) widen(w->file + d[0], l, d[1], (u8 *)&x, size, 0);
    }
  }
  M->progress++;
  return SYS_NEXT;
}

/* Address-space queries on generic addresses. */
EXPORT int sys_isspacep(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M, (void)f;
  const u64 *a = WROW(u64, i->o[1]);
  u32 r = 0;
  for (int l = 0; l < LANES; l++) {
    u64 window = a[l] >> WINDOW_SHIFT;
    int yes = window == (u64)i->imm;
    if (yes && i->aux) yes = (u32)a[l] >> RANK_SHIFT == w->cta->rank; /* isspacep.shared::cta */
    r |= (u32)yes << l;
  }
  w->pred[i->o[0]] = (w->pred[i->o[0]] & ~m) | (r & m);
  return SYS_NEXT;
}
