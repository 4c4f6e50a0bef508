/* Warp-wide instructions: they need every lane of their member mask in one fragment before they can run. */
#include "lane.h"

/* True when all live lanes of `want` are in the fragment; otherwise the fragment waits for them. */
static int gathered(warp *w, frag *f, u32 want) {
  if (!(w->live & want & ~f->mask)) return 1;
  f->wait = WAIT_CONVERGE;
  f->want = want;
  return 0;
}
static inline u32 member_mask(warp *w, const insn *i, int k, u32 m) { return WROW(u32, i->o[k])[first_lane(m)]; }
static inline void write32(warp *w, u32 row, u32 m, const u32 *v) {
  u32 *d = WROW(u32, row);
  for (int l = 0; l < LANES; l++) d[l] = m >> l & 1 ? v[l] : d[l];
}
static inline void fill32(warp *w, u32 row, u32 m, u32 v) {
  u32 *d = WROW(u32, row);
  for (int l = 0; l < LANES; l++) d[l] = m >> l & 1 ? v : d[l];
}
static inline void write_pred(warp *w, u32 p, u32 m, u32 v) { w->pred[p] = (w->pred[p] & ~m) | (v & m); }

EXPORT int sys_converge(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M, (void)i, (void)m;
  return gathered(w, f, FULL) ? SYS_NEXT : SYS_BLOCK;
}

EXPORT int sys_warpsync(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  u32 want = member_mask(w, i, 1, m);
  if (!gathered(w, f, want)) return SYS_BLOCK;
  if (!((w->accessors | w->solo_lanes) & ~want)) clock_sync_lanes(M, w);
  return SYS_NEXT;
}

/* elect.sync chooses the lowest lane: the ISA leaves the choice open but says it is deterministic. */
EXPORT int sys_elect(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M;
  u32 want = member_mask(w, i, 1, m);
  if (!gathered(w, f, want)) return SYS_BLOCK;
  u32 lead = (u32)first_lane(m & want ? m & want : m);
  if (i->o[0] != NONE) fill32(w, i->o[0], m, lead);
  write_pred(w, i->o[5], m, 1u << lead);
  return SYS_NEXT;
}

/* shfl.sync: segment and clamp as in the pseudocode of the PTX ISA ("shfl.sync"). imm: 0 up, 1 down, 2 bfly, 3 idx. */
EXPORT int sys_shfl(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  u32 want = i->o[4] == NONE ? FULL : member_mask(w, i, 4, m);
  if (!gathered(w, f, want)) return SYS_BLOCK;
  u32 a[LANES], out[LANES], ok = 0;
  memcpy(a, WROW(u32, i->o[1]), sizeof a);
  const u32 *b = WROW(u32, i->o[2]), *c = WROW(u32, i->o[3]);
  for (int l = 0; l < LANES; l++) {
    int n = (int)(b[l] & 31), clamp = (int)(c[l] & 31), segment = (int)(c[l] >> 8 & 31);
    int top = (l & segment) | (clamp & ~segment), bottom = l & segment, j, in;
    switch (i->imm) {
      case 0: j = l - n; in = j >= top; break;
      case 1: j = l + n; in = j <= top; break;
      case 2: j = l ^ n; in = j <= top; break;
      default: j = bottom | (n & ~segment); in = j <= top;
    }
    if (!in) j = l;
    ok |= (u32)in << l;
    if (m >> l & 1 && !(m >> (j & 31) & 1)) return fail(M, w, i, ERR_SHFL_LANE, l, (u64)j, 0);
    out[l] = a[j & 31];
  }
  write32(w, i->o[0], m, out);
  if (i->o[5] != NONE) write_pred(w, i->o[5], m, ok);
  return SYS_NEXT;
}

/* vote.sync. imm: 0 any, 1 all, 2 uni, 3 ballot; +4 when the source predicate is negated. */
EXPORT int sys_vote(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M;
  u32 want = i->o[2] == NONE ? FULL : member_mask(w, i, 2, m);
  if (!gathered(w, f, want)) return SYS_BLOCK;
  u32 p = i->imm & 4 ? ~w->pred[i->o[1]] : w->pred[i->o[1]], act = m & want;
  p &= act;
  switch (i->imm & 3) {
    case 0: write_pred(w, i->o[0], m, p ? FULL : 0); break;
    case 1: write_pred(w, i->o[0], m, p == act ? FULL : 0); break;
    case 2: write_pred(w, i->o[0], m, p == act || !p ? FULL : 0); break;
    default: fill32(w, i->o[0], m, p);
  }
  return SYS_NEXT;
}

EXPORT int sys_activemask(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M, (void)f;
  fill32(w, i->o[0], m, m);
  return SYS_NEXT;
}

/* match.sync. imm bit 0: all; size: operand bytes. */
EXPORT int sys_match(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M;
  u32 want = member_mask(w, i, 2, m), out[LANES] = {0};
  if (!gathered(w, f, want)) return SYS_BLOCK;
  const u8 *a = WROW(u8, i->o[1]);
  u32 act = m & want;
  for (int l = 0; l < LANES; l++)
    for (int k = 0; k < LANES; k++)
      if (act >> k & 1 && !memcmp(a + i->size * l, a + i->size * k, i->size)) out[l] |= 1u << k;
  if (i->imm & 1) {
    int all = out[first_lane(act)] == act;
    fill32(w, i->o[0], m, all ? act : 0);
    if (i->o[5] != NONE) write_pred(w, i->o[5], m, all ? FULL : 0);
  } else {
    write32(w, i->o[0], m, out);
  }
  return SYS_NEXT;
}

/* redux.sync. imm: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor; aux: 0 u32, 1 s32, 2 f32; +4 abs, +8 NaN. */
EXPORT int sys_redux(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M;
  u32 want = member_mask(w, i, 2, m);
  if (!gathered(w, f, want)) return SYS_BLOCK;
  const u32 *a = WROW(u32, i->o[1]);
  int type = i->aux & 3, first = 1;
  u32 r = 0;
  for (u32 rest = m & want; rest; rest &= rest - 1) {
    u32 x = a[first_lane(rest)];
    if (type == 2 && i->aux & 4) x &= 0x7fffffff;
    if (first) { r = x; first = 0; continue; }
    if (type == 2) {
      f32 fx = f32_of(x), fr = f32_of(r);
      if (fx != fx || fr != fr) {
        r = i->aux & 8 ? 0x7fffffff : fx != fx ? r : x;
        continue;
      }
      r = (i->imm == 1 ? fx < fr : fx > fr) ? x : r;
      continue;
    }
    switch (i->imm) {
      case 0: r += x; break;
      case 1: r = type ? ((i32)x < (i32)r ? x : r) : x < r ? x : r; break;
      case 2: r = type ? ((i32)x > (i32)r ? x : r) : x > r ? x : r; break;
      case 3: r &= x; break;
      case 4: r |= x; break;
      default: r ^= x;
    }
  }
  fill32(w, i->o[0], m, r);
  return SYS_NEXT;
}

/* movmatrix: transposes an 8x8 matrix of 16-bit elements held two per lane, row = lane / 4. */
EXPORT int sys_movmatrix(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M;
  if (!gathered(w, f, FULL)) return SYS_BLOCK;
  u16 in[64], out[64];
  memcpy(in, WROW(u16, i->o[1]), sizeof in);
  for (int r = 0; r < 8; r++) for (int c = 0; c < 8; c++) out[8 * r + c] = in[8 * c + r];
  write32(w, i->o[0], m, (const u32 *)out);
  return SYS_NEXT;
}

EXPORT int sys_trap(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  return fail(M, w, i, ERR_TRAP, first_lane(m), 0, 0);
}

EXPORT int sys_clock(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)f;
  if (i->size == 8) {
    u64 *d = WROW(u64, i->o[0]);
    for (int l = 0; l < LANES; l++) if (m >> l & 1) d[l] = (u64)M->instructions;
  } else {
    fill32(w, i->o[0], m, (u32)M->instructions);
  }
  return SYS_NEXT;
}

/* mapa: the address of the same offset in another CTA of the cluster. A rank outside the cluster is a fault only when
 * the address is used: kernels map one rank per lane. size: address bytes. */
EXPORT int sys_mapa(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M, (void)f;
  const u32 *rank = WROW(u32, i->o[2]);
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    if (i->size == 8) {
      u64 *d = WROW(u64, i->o[0]);
      d[l] = (WROW(u64, i->o[1])[l] & ~0xff000000ull) | (u64)(rank[l] & 255) << RANK_SHIFT;
    } else {
      WROW(u32, i->o[0])[l] = (WROW(u32, i->o[1])[l] & OFFSET_MASK) | rank[l] << RANK_SHIFT;
    }
  }
  return SYS_NEXT;
}
EXPORT int sys_getctarank(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)M, (void)f;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    u64 a = i->size == 8 ? WROW(u64, i->o[1])[l] : WROW(u32, i->o[1])[l];
    WROW(u32, i->o[0])[l] = (u32)(a >> RANK_SHIFT) & 255;
  }
  return SYS_NEXT;
}
