/* Floating-point arithmetic. Default forms are plain IEEE operations. Forms with .ftz, .sat or a directed rounding go
 * through the *_any functions, whose imm names the form (see enum). Contraction is off, so a product and a sum stay
 * two roundings unless the instruction is fma. */
#include <fenv.h>
#include "interpolator.h"

enum { ANY_FTZ = 1, ANY_SAT = 2, ANY_ROUND = 4 /* rounding mode in bits 2..4 */, ANY_RELU = 32 };

#define PLAIN(t, T) \
  BINARY(add_##t, T, T, T, a + b) \
  BINARY(sub_##t, T, T, T, a - b) \
  BINARY(mul_##t, T, T, T, a * b) \
  BINARY(div_##t, T, T, T, a / b)
PLAIN(f32, f32)
PLAIN(f64, f64)
TERNARY(fma_f32, f32, f32, f32, f32, __builtin_fmaf(a, b, c))
TERNARY(fms_f32, f32, f32, f32, f32, __builtin_fmaf(a, b, -c))
TERNARY(fnma_f32, f32, f32, f32, f32, __builtin_fmaf(-a, b, c))
TERNARY(fma_f64, f64, f64, f64, f64, __builtin_fma(a, b, c))
BINARY(add_ftz_f32, f32, f32, f32, flush(flush(a) + flush(b)))
BINARY(sub_ftz_f32, f32, f32, f32, flush(flush(a) - flush(b)))
BINARY(mul_ftz_f32, f32, f32, f32, flush(flush(a) * flush(b)))
BINARY(div_ftz_f32, f32, f32, f32, flush(flush(a) / flush(b)))
TERNARY(fma_ftz_f32, f32, f32, f32, f32, flush(__builtin_fmaf(flush(a), flush(b), flush(c))))
TERNARY(fms_ftz_f32, f32, f32, f32, f32, flush(__builtin_fmaf(flush(a), flush(b), -flush(c))))
TERNARY(fnma_ftz_f32, f32, f32, f32, f32, flush(__builtin_fmaf(-flush(a), flush(b), flush(c))))

#define FLIP(t, U, sign) UNARY(neg_##t, U, U, a ^ (U)sign) UNARY(abs_##t, U, U, a & (U)~(sign))
FLIP(f32, u32, 0x80000000u)
FLIP(f64, u64, 0x8000000000000000ull)
FLIP(f16, u16, 0x8000u)
FLIP(f16x2, u32, 0x80008000u)
UNARY(neg_ftz_f32, f32, f32, flush(-a))
UNARY(abs_ftz_f32, f32, f32, flush(fabsf(a)))
BINARY(copysign_f32, u32, u32, u32, (a & 0x80000000u) | (b & 0x7fffffffu))
BINARY(copysign_f64, u64, u64, u64, (a & 1ull << 63) | (b & ~(1ull << 63)))

/* min/max: a NaN operand loses unless .NaN is given; -0 < +0 (PTX ISA, "min", "max"). */
static inline f32 min2(f32 a, f32 b) {
  return a != a ? (b != b ? f32_of(0x7fffffff) : b) : b != b ? a : a < b ? a : b < a ? b : signbit(a) ? a : b;
}
static inline f32 max2(f32 a, f32 b) {
  return a != a ? (b != b ? f32_of(0x7fffffff) : b) : b != b ? a : a > b ? a : b > a ? b : signbit(a) ? b : a;
}
static inline f32 min_nan(f32 a, f32 b) { return a != a || b != b ? f32_of(0x7fffffff) : min2(a, b); }
static inline f32 max_nan(f32 a, f32 b) { return a != a || b != b ? f32_of(0x7fffffff) : max2(a, b); }

/* Vector-friendly min/max: selects on the bits, in the same order of tests as above. */
#define EXTREME(name, less, keep_if_negative) OP(name) { (void)pred; \
  u32 *d = ROW(u32, 0); const u32 *a = ROW(u32, 1), *b = ROW(u32, 2); \
  LOOP { u32 x = a[l], y = b[l]; f32 fx = f32_of(x), fy = f32_of(y); \
    u32 take = fx less fy, tie = fx == fy, neg = x >> 31; \
    u32 r = take ? x : tie ? ((neg == keep_if_negative) ? x : y) : y; \
    r = fy != fy ? x : r; r = fx != fx ? y : r; \
    d[l] = (fx != fx) & (fy != fy) ? 0x7fffffffu : r; } }
EXTREME(min_f32, <, 1)
EXTREME(max_f32, >, 0)
BINARY(min_nan_f32, f32, f32, f32, min_nan(a, b))
BINARY(max_nan_f32, f32, f32, f32, max_nan(a, b))
TERNARY(min3_f32, f32, f32, f32, f32, min2(min2(a, b), c))
TERNARY(max3_f32, f32, f32, f32, f32, max2(max2(a, b), c))
TERNARY(min3_nan_f32, f32, f32, f32, f32, min_nan(min_nan(a, b), c))
TERNARY(max3_nan_f32, f32, f32, f32, f32, max_nan(max_nan(a, b), c))
BINARY(min_ftz_f32, f32, f32, f32, min2(flush(a), flush(b)))
BINARY(max_ftz_f32, f32, f32, f32, max2(flush(a), flush(b)))
#define XORSIGN(x, a, b) f32_of((bits_of(x) & 0x7fffffff) | ((bits_of(a) ^ bits_of(b)) & 0x80000000u))
BINARY(min_xorsign_abs_f32, f32, f32, f32, XORSIGN(min2(fabsf(a), fabsf(b)), a, b))
BINARY(max_xorsign_abs_f32, f32, f32, f32, XORSIGN(max2(fabsf(a), fabsf(b)), a, b))
BINARY(min_f64, f64, f64, f64, fmin(a, b))
BINARY(max_f64, f64, f64, f64, fmax(a, b))

/* Pairs of f32 in a 64-bit register. */
#define PAIR32(name, expr) OP(name) { \
  (void)pred; f32 *d = ROW(f32, 0); const f32 *a_ = ROW(f32, 1), *b_ = ROW(f32, 2); \
  _Pragma("GCC ivdep") for (int l = 0; l < 2 * LANES; l++) { f32 a = a_[l], b = b_[l]; d[l] = (expr); } }
PAIR32(add_f32x2, a + b)
PAIR32(sub_f32x2, a - b)
PAIR32(mul_f32x2, a * b)
PAIR32(add_ftz_f32x2, flush(flush(a) + flush(b)))
PAIR32(sub_ftz_f32x2, flush(flush(a) - flush(b)))
PAIR32(mul_ftz_f32x2, flush(flush(a) * flush(b)))
#define PAIR32_FMA(name, expr) OP(name) { (void)pred; f32 *d = ROW(f32, 0); \
  const f32 *a_ = ROW(f32, 1), *b_ = ROW(f32, 2), *c_ = ROW(f32, 3); \
  _Pragma("GCC ivdep") for (int l = 0; l < 2 * LANES; l++) { f32 a = a_[l], b = b_[l], c = c_[l]; d[l] = (expr); } }
PAIR32_FMA(fma_f32x2, __builtin_fmaf(a, b, c))
PAIR32_FMA(fma_ftz_f32x2, flush(__builtin_fmaf(flush(a), flush(b), flush(c))))

/* Half precision. Sums and products of two f16 or bf16 values are exact in f64, or far from a rounding boundary of the
 * 16-bit format. So one rounding from f64 gives the correctly rounded result. A product can sit exactly on a boundary.
 * fma therefore rounds its sum to odd first, which a second rounding to nearest cannot spoil. */
static inline f64 sum_to_odd(f64 a, f64 b) {
  f64 s = a + b, t = s - a, e = (a - (s - t)) + (b - t);
  return e != 0 && e == e && !isinf(s) && !(bits_of64(s) & 1) ? nextafter(s, e > 0 ? INFINITY : -INFINITY) : s;
}
#define HALF_BIN(name, n, get, round, expr) OP(name) { (void)pred; u16 *d = ROW(u16, 0); \
  const u16 *a_ = ROW(u16, 1), *b_ = ROW(u16, 2); \
  for (int l = 0; l < n; l++) { f64 a = get(a_[l]), b = get(b_[l]); d[l] = round(expr, (u32)i->imm); } }
#define HALF_FMA(name, n, get, round) OP(name) { (void)pred; u16 *d = ROW(u16, 0); \
  const u16 *a = ROW(u16, 1), *b = ROW(u16, 2), *c = ROW(u16, 3); \
  for (int l = 0; l < n; l++) d[l] = round(sum_to_odd((f64)get(a[l]) * (f64)get(b[l]), get(c[l])), (u32)i->imm); }
#define HALF_ALL(t, n, get, round) \
  HALF_BIN(add_##t, n, get, round, a + b) HALF_BIN(sub_##t, n, get, round, a - b) \
  HALF_BIN(mul_##t, n, get, round, a * b) \
  HALF_BIN(min_##t, n, get, round, min2((f32)a, (f32)b)) HALF_BIN(max_##t, n, get, round, max2((f32)a, (f32)b)) \
  HALF_BIN(min_nan_##t, n, get, round, min_nan((f32)a, (f32)b)) \
  HALF_BIN(max_nan_##t, n, get, round, max_nan((f32)a, (f32)b)) \
  HALF_FMA(fma_##t, n, get, round)
static inline u16 round_f16(f64 x, u32 flags) {
  if (flags & ANY_RELU && !(x > 0) && x == x) x = 0;
  if (flags & ANY_SAT) x = x > 0 ? (x > 1 ? 1 : x) : 0;
  return f64_to_f16(x, ROUND_NEAREST, 0);
}
static inline u16 round_bf16(f64 x, u32 flags) {
  if (flags & ANY_RELU && !(x > 0) && x == x) x = 0;
  return f64_to_bf16(x, ROUND_NEAREST, 0);
}
HALF_ALL(f16, LANES, f16_to_f32, round_f16)
HALF_ALL(f16x2, 2 * LANES, f16_to_f32, round_f16)
HALF_ALL(bf16, LANES, bf16_to_f32, round_bf16)
HALF_ALL(bf16x2, 2 * LANES, bf16_to_f32, round_bf16)

/* The function unit's results of 32 bits, cut off. */
static inline u16 ex2_of_f16(u16 x) {
  f32 power = ex2_unit(f16_to_f32(x));
  return power >= 0x1p16f ? 0x7c00 : f64_to_f16(power, ROUND_ZERO, 0);
}
static inline u16 ex2_of_bf16(u16 x) { return f32_to_bf16_rz(ex2_unit(flush(bf16_to_f32(x)))); }
static inline u16 tanh_of_f16(u16 x) { return f64_to_f16(tanh_unit(f16_to_f32(x)), ROUND_ZERO, 0); }
static inline u16 tanh_of_bf16(u16 x) { return f32_to_bf16_rz(tanh_unit(bf16_to_f32(x))); }
#define HALF_UNIT(op, t) \
  UNARY(op##_##t, u16, u16, op##_of_##t(a)) \
  UNARY(op##_##t##x2, u32, u32, op##_of_##t((u16)a) | (u32)op##_of_##t(a >> 16) << 16)
HALF_UNIT(ex2, f16)
HALF_UNIT(ex2, bf16)
HALF_UNIT(tanh, f16)
HALF_UNIT(tanh, bf16)

/* Mixed precision (sm_100): f32 result from 16-bit operands. */
BINARY(add_f32_f16, f32, u16, f32, f16_to_f32(a) + b)
BINARY(add_f32_bf16, f32, u16, f32, bf16_to_f32(a) + b)
BINARY(sub_f32_f16, f32, u16, f32, f16_to_f32(a) - b)
BINARY(sub_f32_bf16, f32, u16, f32, bf16_to_f32(a) - b)
TERNARY(fma_f32_f16, f32, u16, u16, f32, __builtin_fmaf(f16_to_f32(a), f16_to_f32(b), c))
TERNARY(fma_f32_bf16, f32, u16, u16, f32, __builtin_fmaf(bf16_to_f32(a), bf16_to_f32(b), c))

/* Approximations. Forms without .ftz are the compiler's: it scales operands that the function unit would flush. */
UNARY(ex2_f32, f32, f32, a < -126.f ? ex2_unit(a * 0.5f) * ex2_unit(a * 0.5f) : ex2_unit(a))
UNARY(ex2_ftz_f32, f32, f32, ex2_unit(flush(a)))
UNARY(lg2_f32, f32, f32, fabsf(a) < 0x1p-126f ? lg2_unit(a * 0x1p24f) - 24.f : lg2_unit(a))
UNARY(lg2_ftz_f32, f32, f32, lg2_unit(flush(a)))
UNARY(rcp_f32, f32, f32, rcp_unit(a))
UNARY(rcp_ftz_f32, f32, f32, flush(rcp_unit(flush(a))))
UNARY(rsqrt_f32, f32, f32, rsqrt_unit(a))
UNARY(rsqrt_ftz_f32, f32, f32, rsqrt_unit(flush(a)))
UNARY(sqrt_f32, f32, f32, sqrt_unit(a))
UNARY(sqrt_ftz_f32, f32, f32, sqrt_unit(flush(a)))
UNARY(tanh_f32, f32, f32, tanh_unit(a))
/* div.approx multiplies by the reciprocal, div.full does so after it has scaled both operands. */
static inline f32 div_approx(f32 a, f32 b) { return a * flush(rcp_unit(b)); }
static inline f32 div_full(f32 a, f32 b) {
  f32 scale = fabsf(b) > 0x1p126f ? 0.25f : fabsf(b) < 0x1p-126f ? 0x1p24f : 1.f;
  return div_approx(a * scale, b * scale);
}
BINARY(div_approx_f32, f32, f32, f32, div_approx(a, b))
BINARY(div_full_f32, f32, f32, f32, div_full(a, b))
BINARY(div_approx_ftz_f32, f32, f32, f32, flush(div_approx(flush(a), flush(b))))
BINARY(div_full_ftz_f32, f32, f32, f32, flush(div_full(flush(a), flush(b))))
/* Nothing is known of the others: the model is the correctly rounded value. README.md has the hardware's distance. */
UNARY(rcp_f64, f64, f64, 1.0 / a)
UNARY(rsqrt_f64, f64, f64, 1.0 / sqrt(a))
UNARY(sqrt_f64, f64, f64, sqrt(a))
UNARY(sin_f32, f32, f32, sin((f64)a))
UNARY(cos_f32, f32, f32, cos((f64)a))

/* Directed rounding, .ftz and .sat in any combination. */
static const int fe_modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
static inline f32 finish(f32 x, u32 flags) {
  if (flags & ANY_FTZ) x = flush(x);
  if (flags & ANY_SAT) x = x > 0 ? (x > 1 ? 1 : x) : 0;
  if (flags & ANY_RELU) x = x != x || x > 0 ? x : 0;
  return x;
}
#define IN(x) (flags & ANY_FTZ ? flush(x) : (x))
#define ANY(name, T, n, expr) OP(name) { (void)pred; u32 flags = (u32)i->imm; \
  volatile const f32 *a_ = ROW(f32, 1), *b_ = ROW(f32, i->o[2] == NONE ? 1 : 2); \
  volatile const f32 *c_ = ROW(f32, i->o[3] == NONE ? 1 : 3); \
  f32 out[n]; int old = fegetround(); fesetround(fe_modes[flags >> 2 & 3]); \
  for (int l = 0; l < n; l++) { volatile f32 a = IN(a_[l]), b = IN(b_[l]), c = IN(c_[l]); (void)b; (void)c; \
    volatile f32 r = (expr); out[l] = r; } \
  fesetround(old); f32 *d = ROW(f32, 0); \
  for (int l = 0; l < n; l++) d[l] = finish(out[l], flags); }
ANY(add_any_f32, f32, LANES, a + b)
ANY(sub_any_f32, f32, LANES, a - b)
ANY(mul_any_f32, f32, LANES, a * b)
ANY(div_any_f32, f32, LANES, a / b)
ANY(fma_any_f32, f32, LANES, __builtin_fmaf(a, b, c))
ANY(sqrt_any_f32, f32, LANES, __builtin_sqrtf(a))
ANY(rcp_any_f32, f32, LANES, 1.0f / a)
ANY(add_any_f32x2, f32, 2 * LANES, a + b)
ANY(sub_any_f32x2, f32, 2 * LANES, a - b)
ANY(mul_any_f32x2, f32, 2 * LANES, a * b)
ANY(fma_any_f32x2, f32, 2 * LANES, __builtin_fmaf(a, b, c))

/* Comparisons: the plain forms are false for NaN, the *u forms true; num and nan test for NaN. */
void store_compare(u32 *pred, const insn *i, u32 yes);
#define COMPARE_ALL(t, T, get) \
  CMP(eq_##t, T, get, a == b) CMP(ne_##t, T, get, a < b || a > b) CMP(lt_##t, T, get, a < b) \
  CMP(le_##t, T, get, a <= b) CMP(gt_##t, T, get, a > b) CMP(ge_##t, T, get, a >= b) \
  CMP(equ_##t, T, get, !(a < b || a > b)) CMP(neu_##t, T, get, !(a == b)) CMP(ltu_##t, T, get, !(a >= b)) \
  CMP(leu_##t, T, get, !(a > b)) CMP(gtu_##t, T, get, !(a <= b)) CMP(geu_##t, T, get, !(a < b)) \
  CMP(num_##t, T, get, a == a && b == b) CMP(nan_##t, T, get, a != a || b != b)
#define CMP(name, T, get, expr) OP(setp_##name) { const T *a_ = ROW(T, 1), *b_ = ROW(T, 2); u8 r[LANES]; \
  for (int l = 0; l < LANES; l++) { __typeof__(get(a_[l])) a = get(a_[l]), b = get(b_[l]); r[l] = (expr); } \
  store_compare(pred, i, mask_of(r)); }
#define SELF(x) (x)
COMPARE_ALL(f32, f32, SELF)
COMPARE_ALL(f64, f64, SELF)
COMPARE_ALL(f16, u16, f16_to_f32)
COMPARE_ALL(bf16, u16, bf16_to_f32)
/* Packed forms write two predicates: element 0 to o[0], element 1 to o[5]. */
#define CMP2(name, get, expr) OP(setp_##name) { const u16 *x = ROW(u16, 1), *y = ROW(u16, 2); u32 r[2] = {0, 0}; \
  for (int l = 0; l < 2 * LANES; l++) { f32 a = get(x[l]), b = get(y[l]); r[l & 1] |= (u32)(expr) << (l >> 1); } \
  if (i->o[0] != NONE) pred[i->o[0]] = r[0]; \
  if (i->o[5] != NONE) pred[i->o[5]] = r[1]; }
#define CMP2_ALL(t, get) CMP2(eq_##t, get, a == b) CMP2(ne_##t, get, a < b || a > b) CMP2(lt_##t, get, a < b) \
  CMP2(le_##t, get, a <= b) CMP2(gt_##t, get, a > b) CMP2(ge_##t, get, a >= b) CMP2(neu_##t, get, !(a == b)) \
  CMP2(nan_##t, get, a != a || b != b) CMP2(num_##t, get, a == a && b == b)
CMP2_ALL(f16x2, f16_to_f32)
CMP2_ALL(bf16x2, bf16_to_f32)

/* testp */
#define TESTP(name, T, expr) OP(testp_##name) { const T *a_ = ROW(T, 1); u8 r[LANES]; \
  for (int l = 0; l < LANES; l++) { T a = a_[l]; r[l] = (expr) != 0; } store_compare(pred, i, mask_of(r)); }
TESTP(finite_f32, f32, isfinite(a))
TESTP(infinite_f32, f32, isinf(a))
TESTP(number_f32, f32, a == a)
TESTP(notanumber_f32, f32, a != a)
TESTP(normal_f32, f32, isnormal(a))
TESTP(subnormal_f32, f32, fpclassify(a) == FP_SUBNORMAL)
