/* The function unit of the GPU, bit by bit: ex2, lg2, rcp, rsqrt, sqrt and tanh.
 *
 * Oberman and Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH-17, 2005): c0 + c1 x + c2 x^2
 * over 64 or 128 segments of the mantissa (tanh: 1 to 16 of a binade). The coefficients have 26, 16 and 10 bits (tanh:
 * c2 of 14). The squarer leaves out the low columns of its partial products. Sums are in units of 2^-40 here; results
 * are cut off, not rounded. The widths and the constants come from an H200's results, which this reproduces at every
 * bit pattern that was measured (README.md). */
#ifndef HOPWELL_INTERPOLATOR_H
#define HOPWELL_INTERPOLATOR_H
#include "numbers.h"

typedef struct { u32 c0; u16 c1, c2; } segment;
#include "interpolator_tables.h"

/* Square of a number of `bits` bits without the partial products below column `cut`, in units of 2^cut. */
static inline i64 truncated_square(u32 x, int bits, int cut) {
  u32 total = 0;
  for (int i = (cut + 1) / 2; i < bits; i++) {
    u32 below = x & ((1u << i) - 1);
    total += (x >> i & 1) * ((below >> (cut - 1 - i)) + (1u << (2 * i - cut)));
  }
  return total;
}

/* 2^x as a float's bits between 1 and 2, of 23 fraction bits. */
static inline u32 ex2_fraction(u32 fraction) {
  const segment *s = &ex2_segments[fraction >> 17];
  u32 x = fraction & 0x1ffff;
  i64 sum = ((i64)s->c0 << 15) + ((i64)s->c1 * x << 2) + (s->c2 * truncated_square(x, 17, 19) << 2) + 24458;
  return 0x3f000000 + (u32)(sum >> 17);
}
/* log2 of 1 + mantissa / 2^23, in units of 2^-40. */
static inline i64 lg2_mantissa(u32 mantissa) {
  const segment *s = &lg2_segments[mantissa >> 17];
  u32 x = mantissa & 0x1ffff;
  return ((i64)s->c0 << 14) + ((i64)s->c1 * x << 2) - (s->c2 * truncated_square(x, 17, 19) << 3) + 3350;
}
/* 2^24 / (1 + mantissa / 2^23) */
static inline i64 rcp_mantissa(u32 mantissa) {
  const segment *s = &rcp_segments[mantissa >> 16];
  u32 x = mantissa & 0xffff;
  return (((i64)s->c0 << 14) - ((i64)s->c1 * x << 1) + (s->c2 * truncated_square(x, 16, 17) << 1) + 4046) >> 16;
}
/* 2^24 / sqrt of a value in [1, 4): bit 23 of `mantissa` is 1 from 2 on. One is exact. */
static inline i64 rsqrt_mantissa(u32 mantissa) {
  const segment *s = &rsqrt_segments[mantissa >> 17];
  u32 x = mantissa & 0x1ffff;
  i64 sum = ((i64)s->c0 << 14) - (i64)s->c1 * x + (s->c2 * truncated_square(x, 17, 19) << 2) + 16383;
  return mantissa ? sum >> 16 : 1 << 24;
}
/* 2^23 * sqrt of a value in [1, 4), as above. c1 needs more than 16 bits from 2 on, and has a coarser unit there. */
static inline i64 sqrt_mantissa(u32 mantissa) {
  const segment *s = &sqrt_segments[mantissa >> 17];
  u32 x = mantissa & 0x1ffff;
  i64 linear = (i64)s->c1 * x << (mantissa >> 23);
  return (((i64)s->c0 << 15) + linear - (s->c2 * truncated_square(x, 17, 19) << 1) + 32767) >> 17;
}
/* tanh of a magnitude's bits in the binades of 2^-8 to 4, in units of 2^-40. Each has its own number of segments (a
 * logarithm), and with it of mantissa bits that count, and its own unit of the coefficients. */
static const struct { u8 first, segments, shift; } tanh_binades[] = {
  {0, 0, 1}, {1, 0, 2}, {2, 0, 3}, {3, 1, 2}, {5, 1, 3}, {7, 2, 2}, {11, 2, 3}, {15, 2, 4}, {19, 3, 3}, {27, 4, 1},
  {43, 3, 3}};
static inline i64 tanh_magnitude(u32 bits) {
  u32 binade = (bits >> 23) - (127 - 8), mantissa = bits & 0x7fffff, segments = tanh_binades[binade].segments;
  const segment *s = &tanh_segments[tanh_binades[binade].first + (mantissa >> (23 - segments))];
  u32 x = mantissa >> (6 - segments) & 0x1ffff;
  i64 sum = ((i64)s->c0 << 15) + (i64)s->c1 * x - (s->c2 * truncated_square(x, 17, 19) << 1);
  return sum << tanh_binades[binade].shift;
}

/* Operands are taken apart as f64, where every float is normal: 2^exponent * (1 + mantissa / 2^23). */
static inline i32 exponent_of(f32 x) { return (i32)(bits_of64(x) >> 52 & 0x7ff) - 1023; }
static inline u32 mantissa_of(f32 x) { return (u32)(bits_of64(x) >> 29) & 0x7fffff; }
static inline f64 power_of_two(i32 n) { return f64_of((u64)(n + 1023) << 52); }
static inline f32 toward_zero(f64 x) { return (f32)f64_of(bits_of64(x) & ~0x1fffffffull); }

/* The exponent n + fraction of a negative x is the complement of its magnitude's, unless the fraction is zero. */
static inline f32 ex2_unit(f32 x) {
  f32 magnitude = fabsf(x) < 200.f ? fabsf(x) : 200.f;
  i32 fixed = (i32)(magnitude * 0x1p23f);
  fixed = x < 0 ? (fixed & 0x7fffff ? ~fixed : -fixed) : fixed;
  f32 result = (f32)(f32_of(ex2_fraction((u32)fixed & 0x7fffff)) * power_of_two(fixed >> 23));
  return x != x ? f32_of(0x7fffffff) : flush(result);
}
static inline f32 lg2_unit(f32 x) {
  i64 sum = ((i64)exponent_of(x) << 40) + lg2_mantissa(mantissa_of(x));
  f64 cut = (f64)((sum < 0 ? -sum : sum) & ~15ll) * 0x1p-40;
  f32 result = copysignf(toward_zero(cut), sum < 0 ? -1.f : 1.f);
  result = x == 1 ? 0 : x == INFINITY ? x : result;
  return x == 0 ? -INFINITY : x > 0 ? result : f32_of(0x7fffffff);
}
/* Denormal results round to nearest: where they are wanted, the compiler multiplies by a power of two. */
static inline f32 rcp_unit(f32 x) {
  f32 result = (f32)((f64)rcp_mantissa(mantissa_of(x)) * power_of_two(-24 - exponent_of(x)));
  result = x == 0 ? INFINITY : fabsf(x) == INFINITY ? 0 : result;
  return x != x ? f32_of(0x7fffffff) : copysignf(result, x);
}
static inline f32 rsqrt_unit(f32 x) {
  i32 exponent = exponent_of(x), odd = exponent & 1;
  f32 result = (f32)((f64)rsqrt_mantissa(mantissa_of(x) | (u32)odd << 23) * power_of_two(-24 - (exponent - odd) / 2));
  result = x == INFINITY ? 0 : result;
  return x == 0 ? copysignf(INFINITY, x) : x > 0 ? result : f32_of(0x7fffffff);
}
static inline f32 sqrt_unit(f32 x) {
  i32 exponent = exponent_of(x), odd = exponent & 1;
  f32 result = (f32)((f64)sqrt_mantissa(mantissa_of(x) | (u32)odd << 23) * power_of_two((exponent - odd) / 2 - 23));
  result = x == 0 || x == INFINITY ? x : result;
  return x >= 0 ? result : f32_of(0x7fffffff);
}
/* Below 2^-8 tanh is its argument, from 8 on it is one. */
static inline f32 tanh_unit(f32 x) {
  f32 magnitude = fabsf(x);
  i64 sum = tanh_magnitude(bits_of(magnitude >= 0x1p-8f && magnitude < 8 ? magnitude : 1));
  f32 result = magnitude < 0x1p-8f ? magnitude : magnitude < 8 ? toward_zero((f64)sum * 0x1p-40) : 1;
  return x != x ? f32_of(0x7fffffff) : copysignf(result, x);
}

#endif
