/* Number formats: scalar conversions shared by the per-lane instructions and the matrix engines.
 *
 * f16 and bf16 are encoded as in IEEE 754. e4m3 (no infinity, NaN 0x7f), e5m2, e2m1, e2m3, e3m2 and ue8m0 follow the
 * OCP microscaling formats specification v1.0. Rounding and saturation follow the PTX ISA, section "cvt". */
#ifndef HOPWELL_NUMBERS_H
#define HOPWELL_NUMBERS_H
#include <math.h>
#include "lane.h"

enum { FMT_F32, FMT_F16, FMT_BF16, FMT_TF32, FMT_E4M3, FMT_E5M2, FMT_E2M1, FMT_E2M3, FMT_E3M2, FMT_UE8M0, FMT_UE4M3,
       FMT_S8, FMT_U8, FMT_S32, FMT_F64 };
enum { ROUND_NEAREST, ROUND_ZERO, ROUND_DOWN, ROUND_UP, ROUND_AWAY };

extern f32 table_e4m3[256], table_e5m2[256], table_e2m1[256], table_e2m3[256], table_e3m2[256], table_ue8m0[256],
    table_ue4m3[256];
extern f32 table_f16[65536];

static inline f32 bf16_to_f32(u16 x) { return f32_of((u32)x << 16); }
static inline f32 f16_to_f32(u16 x) { return table_f16[x]; }

/* Round to nearest even; every NaN becomes 0x7fff. */
static inline u16 f32_to_bf16(f32 x) {
  u32 b = bits_of(x);
  u16 r = (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : r;
}
static inline u16 f32_to_bf16_rz(f32 x) {
  u32 b = bits_of(x);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)(b >> 16);
}

/* Any binary format with `e` exponent and `m` mantissa bits; codes above `top` are `over` (infinity, NaN or the
 * largest). */
static inline u32 encode(f64 x, int e, int m, u32 top, u32 over, u32 nan, int mode) {
  u32 sign = signbit(x) ? 1u << (e + m) : 0;
  if (x != x) return nan;
  f64 a = fabs(x);
  if (a == 0) return sign;
  if (isinf(a)) return sign | over;
  int emin = 2 - (1 << (e - 1)), k;
  frexp(a, &k);
  k = k - 1 < emin ? emin : k - 1;
  f64 q = ldexp(a, m - k), r;
  switch (mode) {
    case ROUND_ZERO: r = trunc(q); break;
    case ROUND_DOWN: r = sign ? ceil(q) : floor(q); break;
    case ROUND_UP: r = sign ? floor(q) : ceil(q); break;
    case ROUND_AWAY: r = floor(q + 0.5); break;
    default: r = rint(q);
  }
  f64 code = ldexp((f64)(k - emin), m) + r;
  return sign | (code > top ? over : (u32)code);
}
static inline u16 f64_to_f16(f64 x, int mode, int satfinite) {
  u32 over = satfinite || mode == ROUND_ZERO ? 0x7bff : 0x7c00;
  return (u16)encode(x, 5, 10, 0x7bff, isinf(x) && !satfinite ? 0x7c00 : over, 0x7fff, mode);
}
static inline u16 f64_to_bf16(f64 x, int mode, int satfinite) {
  u32 over = satfinite || mode == ROUND_ZERO ? 0x7f7f : 0x7f80;
  return (u16)encode(x, 8, 7, 0x7f7f, isinf(x) && !satfinite ? 0x7f80 : over, 0x7fff, mode);
}
#if defined(__FLT16_MANT_DIG__) && !defined(HOPWELL_NO_FLOAT16)
static inline u16 f32_to_f16(f32 x) {
  _Float16 h = (_Float16)x;
  u16 r;
  memcpy(&r, &h, 2);
  return x != x ? 0x7fff : r;
}
#else
static inline u16 f32_to_f16(f32 x) { return f64_to_f16(x, ROUND_NEAREST, 0); }
#endif
/* cvt to the narrow formats exists only with .satfinite: too large values and infinities become the largest number. */
static inline u32 f64_to_e4m3(f64 x) { return encode(x, 4, 3, 0x7e, 0x7e, 0x7f, ROUND_NEAREST); }
static inline u32 f64_to_e5m2(f64 x) { return encode(x, 5, 2, 0x7b, 0x7b, 0x7f, ROUND_NEAREST); }
static inline u32 f64_to_e2m1(f64 x) { return encode(x, 2, 1, 7, 7, 7, ROUND_NEAREST); }
static inline u32 f64_to_e2m3(f64 x) { return encode(x, 2, 3, 0x1f, 0x1f, 0x1f, ROUND_NEAREST); }
static inline u32 f64_to_e3m2(f64 x) { return encode(x, 3, 2, 0x1f, 0x1f, 0x1f, ROUND_NEAREST); }
/* ue8m0 has no sign and no zero: code c is 2^(c - 127), 255 is NaN; magnitudes are rounded to a power of two. */
static inline u32 f64_to_ue8m0(f64 x, int mode) {
  if (x != x) return 255;
  f64 a = fabs(x);
  if (a == 0) return 0;
  if (isinf(a)) return 254;
  int k;
  f64 frac = frexp(a, &k); /* a = frac * 2^k, frac in [0.5, 1) */
  int e = k - 1 + 127 + (mode == ROUND_UP && frac > 0.5);
  return e < 0 ? 0 : e > 254 ? 254 : (u32)e;
}
static inline u32 f32_to_tf32(f32 x, int mode) {
  u32 b = bits_of(x), low = b & 0x1fff;
  if ((b & 0x7f800000) == 0x7f800000) return b;
  b -= low;
  if (mode == ROUND_ZERO) return b;
  if (mode == ROUND_AWAY) return low >= 0x1000 ? b + 0x2000 : b;
  return low > 0x1000 || (low == 0x1000 && b & 0x2000) ? b + 0x2000 : b;
}

static inline f32 flush(f32 x) { u32 b = bits_of(x); return b & 0x7f800000 ? x : f32_of(b & 0x80000000); }

#endif
