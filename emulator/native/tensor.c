/* Matrix operands and products for wgmma, tcgen05 and mma.sync. This file is compiled with contraction on: its dot
 * products are chains of fused multiply-adds in f32, in the order of k. */
#include "tensor.h"

static inline f32 decode8(u8 x, int format) {
  switch (format) {
    case FMT_E4M3: return table_e4m3[x];
    case FMT_E5M2: return table_e5m2[x];
    case FMT_E2M3: return table_e2m3[x];
    case FMT_E3M2: return table_e3m2[x];
    case FMT_E2M1: return table_e2m1[x];
    case FMT_UE8M0: return table_ue8m0[x];
    case FMT_UE4M3: return table_ue4m3[x];
    case FMT_S8: return (i8)x;
    default: return x;
  }
}

/* n elements from bytes. Sub-byte formats: PACK_TIGHT is two 4-bit elements to a byte, PACK_BYTE one element in the
 * low bits of a byte. PACK_CHUNK is sixteen elements in the first 8 (4-bit) or 12 (6-bit) bytes of a 16-byte chunk.
 * TMA's ALIGN16B types write this form, and tcgen05's kind::f8f6f4 reads it. */
static void decode_run(const u8 *src, int n, int format, int loose, f32 *out) {
  if (loose == PACK_CHUNK && (format == FMT_E2M1 || format == FMT_E2M3 || format == FMT_E3M2)) {
    int bits = format == FMT_E2M1 ? 4 : 6;
    for (int k = 0; k < n; k++) {
      int at = k % 16 * bits;
      const u8 *chunk = src + k / 16 * 16;
      out[k] = decode8((u8)((chunk[at / 8] | chunk[at / 8 + 1] << 8) >> (at % 8) & ((1 << bits) - 1)), format);
    }
    return;
  }
  switch (format) {
    case FMT_BF16: for (int k = 0; k < n; k++) { u16 x; memcpy(&x, src + 2 * k, 2); out[k] = bf16_to_f32(x); } break;
    case FMT_F16: for (int k = 0; k < n; k++) { u16 x; memcpy(&x, src + 2 * k, 2); out[k] = f16_to_f32(x); } break;
    case FMT_F32: memcpy(out, src, 4 * (size_t)n); break;
    case FMT_TF32:
      for (int k = 0; k < n; k++) { u32 x; memcpy(&x, src + 4 * k, 4); out[k] = f32_of(x & 0xffffe000); }
      break;
    case FMT_E2M1:
      if (!loose) {
        for (int k = 0; k < n; k += 2) out[k] = table_e2m1[src[k / 2] & 15], out[k + 1] = table_e2m1[src[k / 2] >> 4];
        break;
      } /* fall through */
    default: for (int k = 0; k < n; k++) out[k] = decode8(src[k], format);
  }
}
static inline int elements(int bytes, int format, int loose) {
  switch (format) {
    case FMT_BF16: case FMT_F16: return bytes / 2;
    case FMT_F32: case FMT_TF32: return bytes / 4;
    case FMT_E2M1: return loose ? bytes : bytes * 2;
    default: return bytes;
  }
}
EXPORT void core_decode(const u8 *src, i32 n, i32 format, i32 loose, f32 *out) {
  decode_run(src, n, format, loose, out);
}

/* Operand in shared memory as a table of 16-byte chunks [rows][per_row] -> f32 [rows][elements], or transposed. */
EXPORT void core_gather(const u8 *smem, const i32 *chunks, i32 rows, i32 per_row, i32 format, i32 loose, f32 *out,
                        i32 stride, i32 transpose) {
  int t = elements(16, format, loose);
  f32 v[32];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < per_row; c++) {
      decode_run(smem + 16 * (size_t)chunks[r * per_row + c], t, format, loose,
                 transpose ? v : out + (size_t)r * stride + c * t);
      if (transpose) for (int e = 0; e < t; e++) out[(size_t)(c * t + e) * stride + r] = v[e];
    }
}

/* ------------------------------------------------------------------ products */
typedef f32 v8 __attribute__((vector_size(32), aligned(4), may_alias));
#define SPLAT(x) ((v8){x, x, x, x, x, x, x, x})

/* acc[m][n] += a[m][k] * b[k][n], four rows and sixteen columns at a time. n is a multiple of 8. */
EXPORT void core_gemm(f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 lda, i32 ldb, i32 ldc) {
  for (int j = 0; j < n; j += 16) {
    int wide = j + 16 <= n;
    for (int r = 0; r < m; r += 4) {
      int rows = m - r < 4 ? m - r : 4;
      v8 s[4][2];
      for (int x = 0; x < rows; x++) {
        s[x][0] = *(v8 *)(acc + (size_t)(r + x) * ldc + j);
        s[x][1] = wide ? *(v8 *)(acc + (size_t)(r + x) * ldc + j + 8) : SPLAT(0);
      }
      if (rows == 4 && wide) {
        const f32 *a0 = a + (size_t)r * lda, *a1 = a0 + lda, *a2 = a1 + lda, *a3 = a2 + lda;
        v8 s00 = s[0][0], s01 = s[0][1], s10 = s[1][0], s11 = s[1][1];
        v8 s20 = s[2][0], s21 = s[2][1], s30 = s[3][0], s31 = s[3][1];
        for (int q = 0; q < k; q++) {
          v8 b0 = *(const v8 *)(b + (size_t)q * ldb + j), b1 = *(const v8 *)(b + (size_t)q * ldb + j + 8);
          s00 += a0[q] * b0; s01 += a0[q] * b1; s10 += a1[q] * b0; s11 += a1[q] * b1;
          s20 += a2[q] * b0; s21 += a2[q] * b1; s30 += a3[q] * b0; s31 += a3[q] * b1;
        }
        s[0][0] = s00, s[0][1] = s01, s[1][0] = s10, s[1][1] = s11;
        s[2][0] = s20, s[2][1] = s21, s[3][0] = s30, s[3][1] = s31;
      } else {
        for (int q = 0; q < k; q++)
          for (int x = 0; x < rows; x++) {
            f32 y = a[(size_t)(r + x) * lda + q];
            s[x][0] += y * *(const v8 *)(b + (size_t)q * ldb + j);
            if (wide) s[x][1] += y * *(const v8 *)(b + (size_t)q * ldb + j + 8);
          }
      }
      for (int x = 0; x < rows; x++) {
        *(v8 *)(acc + (size_t)(r + x) * ldc + j) = s[x][0];
        if (wide) *(v8 *)(acc + (size_t)(r + x) * ldc + j + 8) = s[x][1];
      }
    }
  }
}

/* ------------------------------------------------------------------ register fragments of a 16 x n tile
 *
 * PTX ISA, "matrix fragments for wgmma.mma_async.m64nNk16", and mma.m16n8. Accumulators: register 4j + 2h + c of lane
 * 4g + t holds row 8h + g, column 8j + 2t + c. A operand: register 4q + 2s + h holds row 8h + g and the 4 bytes at 32q
 * + 16s + 4t of the row. So one warp's registers are 16 rows of k bytes. */
EXPORT void core_load_accumulators(const u8 *file, const u32 *rows, i32 n, f32 *acc, i32 stride) {
  for (int j = 0; j < n / 8; j++)
    for (int h = 0; h < 2; h++) {
      const f32 *c0 = (const f32 *)(file + rows[4 * j + 2 * h]), *c1 = (const f32 *)(file + rows[4 * j + 2 * h + 1]);
      for (int l = 0; l < LANES; l++) {
        f32 *d = acc + (size_t)(8 * h + l / 4) * stride + 8 * j + 2 * (l % 4);
        d[0] = c0[l], d[1] = c1[l];
      }
    }
}
EXPORT void core_store_accumulators(u8 *file, const u32 *rows, i32 n, const f32 *acc, i32 stride) {
  for (int j = 0; j < n / 8; j++)
    for (int h = 0; h < 2; h++) {
      f32 *c0 = (f32 *)(file + rows[4 * j + 2 * h]), *c1 = (f32 *)(file + rows[4 * j + 2 * h + 1]);
      for (int l = 0; l < LANES; l++) {
        const f32 *d = acc + (size_t)(8 * h + l / 4) * stride + 8 * j + 2 * (l % 4);
        c0[l] = d[0], c1[l] = d[1];
      }
    }
}
/* The same with f16 accumulators (two columns per register) and with s32 ones (bits reinterpreted by the caller's
 * type). */
EXPORT void core_load_accumulators_f16(const u8 *file, const u32 *rows, i32 n, f32 *acc, i32 stride) {
  for (int j = 0; j < n / 8; j++)
    for (int h = 0; h < 2; h++) {
      const u16 *c = (const u16 *)(file + rows[2 * j + h]);
      for (int l = 0; l < LANES; l++)
        for (int e = 0; e < 2; e++)
          acc[(size_t)(8 * h + l / 4) * stride + 8 * j + 2 * (l % 4) + e] = f16_to_f32(c[2 * l + e]);
    }
}
EXPORT void core_store_accumulators_f16(u8 *file, const u32 *rows, i32 n, const f32 *acc, i32 stride) {
  for (int j = 0; j < n / 8; j++)
    for (int h = 0; h < 2; h++) {
      u16 *c = (u16 *)(file + rows[2 * j + h]);
      for (int l = 0; l < LANES; l++)
        for (int e = 0; e < 2; e++)
          c[2 * l + e] = f32_to_f16(acc[(size_t)(8 * h + l / 4) * stride + 8 * j + 2 * (l % 4) + e]);
    }
}
static void rows_of_a(const u8 *file, const u32 *rows, int n_regs, u8 *out, int row_bytes) {
  for (int r = 0; r < n_regs; r++) {
    const u32 *v = (const u32 *)(file + rows[r]);
    for (int l = 0; l < LANES; l++)
      memcpy(out + (size_t)(8 * (r & 1) + l / 4) * (size_t)row_bytes + 16 * (r >> 1) + 4 * (l % 4), &v[l], 4);
  }
}
/* Register A operand of one warp: 16 rows, n_regs * 8 bytes each -> f32. */
EXPORT void core_load_a(const u8 *file, const u32 *rows, i32 n_regs, i32 format, f32 *out, i32 stride) {
  u8 raw[16 * 64];
  int row_bytes = n_regs * 8;
  rows_of_a(file, rows, n_regs, raw, row_bytes);
  for (int r = 0; r < 16; r++)
    decode_run(raw + r * row_bytes, elements(row_bytes, format, 0), format, 0, out + (size_t)r * stride);
}

/* An 8-bit float product of an architecture without the instruction, as ptxas 13 writes it for sm_90a and sm_100a. The
 * operands become f16. One instruction multiplies the lower halves of all registers and the next one the upper halves,
 * from zero. The sum is added to the accumulator in f32. */
static void product_in_halves(machine *M, f32 *acc, const f32 *a, const f32 *bt, int k) {
  f32 sum[16 * 8] = {0}, left[16 * 16], right[16 * 8];
  for (int first = 0; first < 4; first += 2) {
    for (int q = 0; q < k / 2; q++) {
      int from = 4 * (q / 2) + first + q % 2;
      for (int r = 0; r < 16; r++) left[r * (k / 2) + q] = a[r * k + from];
      memcpy(right + 8 * q, bt + 8 * from, 8 * sizeof *bt);
    }
    matrix_product(M, sum, left, right, 16, 8, k / 2, k / 2, FMT_F16, UNIT_MMA);
  }
  for (int x = 0; x < 16 * 8; x++) acc[x] += sum[x];
}

/* ------------------------------------------------------------------ mma.sync m16n8k*
 *     lists  d, a, b, c rows    imm  k    aux  1 for a product in halves
 *     o[0]   a registers | b registers << 8 | d registers << 16    o[1]  formats of a, b, c/d (8 bits each)
 *     block scaled: o[2]  scale row of a    o[3]  scale row of b    o[4]  scales per row | scale format << 8
 * The list of a block-scaled product goes on with the 16-bit rows of byte id and thread id of a, then of b. */
EXPORT int sys_mma(machine *M, warp *w, frag *f, const insn *i, u32 m) {
  (void)m;
  if (w->live & ~f->mask) { f->wait = WAIT_CONVERGE; f->want = FULL; return SYS_BLOCK; }
  const u32 *rows = M->lists + i->list;
  int na = i->o[0] & 255, nb = i->o[0] >> 8 & 255, nd = i->o[0] >> 16 & 255, k = (int)i->imm;
  int fa = i->o[1] & 255, fb = i->o[1] >> 8 & 255, fc = i->o[1] >> 16 & 255;
  const u32 *d = rows, *a = d + nd, *b = a + na, *c = b + nb;
  f32 A[16 * 128], B[8 * 128], Bt[128 * 8], acc[16 * 8];
  u8 raw[16 * 64];
  int bytes = na * 8;
  int loose = fa == FMT_E2M1 && elements(bytes, fa, 0) != k; /* kind::f8f6f4 keeps one 4-bit element in a byte */
  rows_of_a(w->file, a, na, raw, bytes);
  if (loose || fa == FMT_E2M3 || fa == FMT_E3M2)
    for (int r = 0; r < 16 * bytes; r++) raw[r] = fa == FMT_E2M1 ? raw[r] >> 2 & 15 : raw[r];
  for (int r = 0; r < 16; r++) decode_run(raw + r * bytes, k, fa, loose, A + r * k);
  for (int r = 0; r < nb; r++) {
    const u32 *v = (const u32 *)(w->file + b[r]);
    for (int l = 0; l < LANES; l++) memcpy(raw + (l / 4) * nb * 16 + 16 * r + 4 * (l % 4), &v[l], 4);
  }
  loose = fb == FMT_E2M1 && elements(nb * 16, fb, 0) != k;
  if (loose) for (int r = 0; r < 8 * nb * 16; r++) raw[r] = raw[r] >> 2 & 15;
  for (int r = 0; r < 8; r++) decode_run(raw + r * nb * 16, k, fb, loose, B + r * k);
  if (i->o[4] != NONE) {
    int per = i->o[4] & 255, fmt = i->o[4] >> 8, block = k / per;
    const u32 *select = c + nd;
    int ida = *WROW(u16, select[0]), ta = *WROW(u16, select[1]);
    int idb = *WROW(u16, select[2]), tb = *WROW(u16, select[3]);
    const u8 *sa = w->file + i->o[2], *sb = w->file + i->o[3];
    /* Rows g and g + 8 of A are scaled by lanes 4g + 2 ta and 4g + 2 ta + 1, column g of B by lane 4g + tb. */
    for (int r = 0; r < 16; r++)
      for (int q = 0; q < k; q++)
        A[r * k + q] *= decode8(sa[4 * (4 * (r % 8) + 2 * ta + r / 8) + ida + q / block], fmt);
    for (int r = 0; r < 8; r++)
      for (int q = 0; q < k; q++) B[r * k + q] *= decode8(sb[4 * (4 * r + tb) + idb + q / block], fmt);
  }
  for (int r = 0; r < 8; r++) for (int q = 0; q < k; q++) Bt[q * 8 + r] = B[r * k + q];
  if (fc == FMT_S32) {
    for (int r = 0; r < 4; r++) {
      u32 out[LANES];
      const u32 *cv = (const u32 *)(w->file + c[r]);
      for (int l = 0; l < LANES; l++) {
        i64 s = 0;
        for (int q = 0; q < k; q++)
          s += (i64)A[(8 * (r >> 1) + l / 4) * k + q] * (i64)Bt[q * 8 + 2 * (l % 4) + (r & 1)];
        out[l] = cv[l] + (u32)s;
      }
      memcpy(w->file + d[r], out, sizeof out);
    }
    return SYS_NEXT;
  }
  if (fc == FMT_F16) core_load_accumulators_f16(w->file, c, 8, acc, 8);
  else core_load_accumulators(w->file, c, 8, acc, 8);
  if (i->aux) product_in_halves(M, acc, A, Bt, k);
  else matrix_product(M, acc, A, Bt, 16, 8, k, k, i->o[4] == NONE ? (u32)fa : FMT_F32, UNIT_MMA);
  if (fc == FMT_F16) core_store_accumulators_f16(w->file, d, 8, acc, 8);
  else core_store_accumulators(w->file, d, 8, acc, 8);
  return SYS_NEXT;
}
