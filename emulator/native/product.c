/* Matrix products with the rounding of the tensor cores.
 *
 * Model: Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv:2511.10909;
 * Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004. One instruction adds the
 * accumulator and its k products in one step. Exponents of products are sums of the factors' exponents, not
 * normalised. Every term is aligned to the largest exponent and cut off after F fractional bits. The sum is exact and
 * is cut off to the width of the result.
 *     wgmma, tcgen05 and sm_120's mma.sync    F = 25, result f32
 *     wgmma with 8-bit floats                 F = 13, result cut to 13 mantissa bits
 * It is an assumption that 8-bit and block-scaled products of sm_120 keep all 25 bits: there was no such GPU to
 * measure. Scales are factors of A and B before the product, which is exact in f32. Without the model, products are
 * chains of fused multiply-adds in the order of k. */
#include "tensor.h"

static inline i32 exponent_of(f32 x, i32 least) {
  u32 b = bits_of(x) & 0x7fffffff;
  if (!b) return -126;
  i32 e = (i32)(b >> 23) - 127;
  if (e == -127) e = -118 - __builtin_clz(b); /* subnormal f32: position of the leading bit */
  return e < least ? least : e;
}

static i32 least_exponent(u32 format) {
  switch (format) {
    case FMT_F16: case FMT_E5M2: return -14;
    case FMT_E4M3: return -6;
    case FMT_E2M1: case FMT_E2M3: return 0;
    case FMT_E3M2: return -2;
    default: return -126;
  }
}

static inline f64 power_of_two(i32 e) { return f64_of((u64)(e + 1023) << 52); }

/* f64 -> f32 towards zero, keeping `bits` mantissa bits. */
static inline f32 cut(f64 x, u32 bits) {
  f32 r = (f32)x;
  u32 b = bits_of(r);
  if (fabs((f64)r) > fabs(x) && (b & 0x7fffffff) <= 0x7f800000) b--;
  if ((b & 0x7f800000) == 0x7f800000) return r;
  return f32_of(b & ~((1u << (23 - bits)) - 1));
}

static void modelled(machine *M, f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 step, u32 format,
                     i32 fraction, u32 bits) {
  i32 *eb = scratch(M, SCRATCH_EXPONENTS, MODEL_K * 256 * sizeof *eb);
  i32 least = least_exponent(format);
  for (i32 first = 0; first < k; first += step) {
    for (i32 q = 0; q < step; q++)
      for (i32 j = 0; j < n; j++) eb[q * n + j] = exponent_of(b[(first + q) * n + j], least);
    for (i32 r = 0; r < m; r++) {
      i32 top[256];
      f64 scale[256], sum[256];
      f32 *row = acc + r * n;
      const f32 *left = a + r * k + first;
      for (i32 j = 0; j < n; j++) top[j] = exponent_of(row[j], -126);
      for (i32 q = 0; q < step; q++) {
        i32 ea = exponent_of(left[q], least);
        for (i32 j = 0; j < n; j++) { i32 e = ea + eb[q * n + j]; top[j] = e > top[j] ? e : top[j]; }
      }
      for (i32 j = 0; j < n; j++) scale[j] = power_of_two(fraction - top[j]), sum[j] = trunc((f64)row[j] * scale[j]);
      for (i32 q = 0; q < step; q++) {
        f64 x = left[q];
        const f32 *right = b + (first + q) * n;
        for (i32 j = 0; j < n; j++) sum[j] += trunc(x * (f64)right[j] * scale[j]);
      }
      for (i32 j = 0; j < n; j++) row[j] = cut(sum[j] / scale[j], bits);
    }
  }
}

/* Accumulates a[m][k] * b[k][n] onto acc; an instruction takes `step` of k. */
void matrix_product(machine *M, f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 step, u32 format,
                    u32 unit) {
  int short_sum = unit == UNIT_WGMMA && (format == FMT_E4M3 || format == FMT_E5M2);
  if (step <= MODEL_K && (M->numerics == NUMERICS_HARDWARE || (M->numerics == NUMERICS_AUTO && short_sum)))
    modelled(M, acc, a, b, m, n, k, step, format, short_sum ? 13 : 25, short_sum ? 13 : 23);
  else
    core_gemm(acc, a, b, m, n, k, k, n, n);
}
EXPORT void core_product(machine *M, f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 step, u32 format,
                         u32 unit) {
  matrix_product(M, acc, a, b, m, n, k, step, format, unit);
}
