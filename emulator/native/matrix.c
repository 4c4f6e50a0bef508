/* ldmatrix and stmatrix: 8x8 matrices of 16-bit elements (and their byte forms) between shared memory and registers.
 * PTX ISA, "ldmatrix", "stmatrix": lane l holds row l / 4, elements 2 (l % 4) and + 1; .trans exchanges rows and
 * columns. */
#include "lane.h"

enum { SHAPE_8X8_B16, SHAPE_16X16_B8, SHAPE_8X16_B4, SHAPE_8X16_B6, SHAPE_16X8_B8, SHAPE_16X16_B4, SHAPE_16X16_B6 };

static int all_here(warp *w, frag *f) {
  if (!(w->live & ~f->mask)) return 1;
  f->wait = WAIT_CONVERGE;
  f->want = FULL;
  return 0;
}

/* Row addresses of `n` lanes -> pointers, with all checks; eight rows are one conflict-free pass at best. */
static int row_pointers(machine *M, warp *w, const insn *i, int n, u32 bytes, int write, u8 **out) {
  for (int l = 0; l < n; l++) {
    u32 address = (i->aux & AUX_ADDR64 ? (u32)WROW(u64, i->o[1])[l] : WROW(u32, i->o[1])[l]) + (u32)i->imm;
    cta *c = shared_cta(M, w, i, address, l);
    if (!c) return SYS_ERROR;
    u32 offset = address & OFFSET_MASK;
    if (offset & 15) return fail(M, w, i, ERR_MISALIGNED, l, address, 16);
    if (offset < SMEM_BASE || offset + bytes > c->smem_size) return fail(M, w, i, ERR_SHARED, l, address, c->smem_size);
    if (c->init) {
      if (write) memset(c->init + offset, 1, bytes);
      else if (memchr(c->init + offset, 0, bytes)) return fail(M, w, i, ERR_UNINIT_SHARED, l, address, 0);
    }
    w->actor = w->agent;
    if (M->flags & (FLAG_RACE | FLAG_PROXY))
      shadow_lanes(M, w, c, offset, bytes, write ? TOUCH_WRITE : 0, LANE_COLLECTIVE, i);
    out[l] = c->smem + offset;
  }
  if (M->flags & FLAG_BANKS) {
    u64 passes = 0;
    for (int g = 0; g < n; g += 8) {
      u8 *seen[8][8];
      u32 count[8] = {0}, most = 1;
      for (int l = g; l < g + 8 && l < n; l++) {
        u32 bank = (u32)((uintptr_t)out[l] >> 4 & 7), k = 0;
        while (k < count[bank] && seen[bank][k] != out[l]) k++;
        if (k == count[bank]) seen[bank][count[bank]++] = out[l];
        if (count[bank] > most) most = count[bank];
      }
      passes += most;
    }
    M->bank_passes[i - M->insns] += passes;
    M->bank_ideal[i - M->insns] += (u64)(n + 7) / 8;
  }
  return 0;
}

static inline u16 *word16(u8 *row, int k) { return (u16 *)(row + 2 * k); }

static int element_bits(int shape) {
  switch (shape) {
    case SHAPE_8X16_B4: case SHAPE_16X16_B4: return 4;
    case SHAPE_8X16_B6: case SHAPE_16X16_B6: return 6;
    default: return 8;
  }
}
/* Element k of a 16-byte row that holds sixteen: all of it, or its first 8 (.b4x16_p64) or 12 bytes (.b6x16_p32). A
 * sub-byte element comes in the low bits of its byte. */
static inline u32 element8(const u8 *row, int k, int bits) {
  int at = k * bits;
  return (u32)(row[at / 8] | (at % 8 ? row[at / 8 + 1] << 8 : 0)) >> (at % 8) & ((1u << bits) - 1);
}

/* lists: register rows; vec: matrices; size: SHAPE_*; space: 1 for .trans. */
EXPORT int sys_ldmatrix(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  if (!all_here(w, f)) return SYS_BLOCK;
  const u32 *dst = M->lists + i->list;
  u8 *row[LANES];
  u32 out[4][LANES];
  int n = i->vec;
  if (i->size == SHAPE_8X8_B16) {
    if (row_pointers(M, w, i, 8 * n, 16, 0, row)) return SYS_ERROR;
    for (int k = 0; k < n; k++)
      for (int l = 0; l < LANES; l++) {
        int r = l / 4, c = 2 * (l % 4);
        out[k][l] = i->space ? *word16(row[8 * k + c], r) | (u32)*word16(row[8 * k + c + 1], r) << 16
                             : *word16(row[8 * k + r], c) | (u32)*word16(row[8 * k + r], c + 1) << 16;
      }
  } else if (i->size == SHAPE_16X16_B8 || i->size == SHAPE_16X16_B4 || i->size == SHAPE_16X16_B6) {
    /* .m16n16.trans: register h of a 16 x 16 byte matrix holds row 8h + l / 4 of the transpose, 4 bytes at 4 (l % 4).
     * The second matrix of .x2 fills registers 2 and 3 (CUTLASS, copy_traits_sm100.hpp, SM100_U8x8_LDSM_T). */
    if (row_pointers(M, w, i, 16 * n, 16, 0, row)) return SYS_ERROR;
    int bits = element_bits(i->size);
    for (int k = 0; k < 2 * n; k++)
      for (int l = 0; l < LANES; l++) {
        out[k][l] = 0;
        for (int e = 0; e < 4; e++)
          out[k][l] |= element8(row[16 * (k / 2) + 4 * (l % 4) + e], 8 * (k & 1) + l / 4, bits) << (8 * e);
      }
    n = 2 * n;
  } else {
    /* .m8n16 with .b4x16_p64 or .b6x16_p32: 16 sub-byte elements of a 16-byte row, one to a byte of the register. */
    if (row_pointers(M, w, i, 8 * n, 16, 0, row)) return SYS_ERROR;
    int bits = element_bits(i->size);
    for (int k = 0; k < n; k++)
      for (int l = 0; l < LANES; l++) {
        out[k][l] = 0;
        for (int e = 0; e < 4; e++) out[k][l] |= element8(row[8 * k + l / 4], 4 * (l % 4) + e, bits) << (8 * e);
      }
  }
  for (int k = 0; k < n; k++) memcpy(w->file + dst[k], out[k], sizeof out[k]);
  return SYS_NEXT;
}

EXPORT int sys_stmatrix(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  if (!all_here(w, f)) return SYS_BLOCK;
  const u32 *src = M->lists + i->list;
  u8 *row[LANES];
  int n = i->vec;
  if (i->size == SHAPE_8X8_B16) {
    if (row_pointers(M, w, i, 8 * n, 16, 1, row)) return SYS_ERROR;
    for (int k = 0; k < n; k++) {
      const u32 *v = WROW(u32, src[k]);
      for (int l = 0; l < LANES; l++) {
        int r = l / 4, c = 2 * (l % 4);
        if (i->space) { *word16(row[8 * k + c], r) = (u16)v[l]; *word16(row[8 * k + c + 1], r) = (u16)(v[l] >> 16); }
        else { *word16(row[8 * k + r], c) = (u16)v[l]; *word16(row[8 * k + r], c + 1) = (u16)(v[l] >> 16); }
      }
    }
  } else {
    /* .m16n8.trans.b8, one register per matrix of eight 16-byte rows: byte e of lane l goes to row 2 (l % 4) + e % 2,
     * column l / 4 + 8 (e / 2) (CUTLASS, copy_traits_sm100.hpp, SM100_U8x8_STSM_T). */
    if (row_pointers(M, w, i, 8 * n, 16, 1, row)) return SYS_ERROR;
    for (int k = 0; k < n; k++) {
      const u32 *v = WROW(u32, src[k]);
      for (int l = 0; l < LANES; l++)
        for (int e = 0; e < 4; e++) row[8 * k + 2 * (l % 4) + (e & 1)][l / 4 + 8 * (e >> 1)] = (u8)(v[l] >> (8 * e));
    }
  }
  M->progress++;
  return SYS_NEXT;
}
