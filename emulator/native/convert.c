/* cvt in all its forms. Common pairs have a lane loop of their own; the rest share convert_any. */
#include <fenv.h>
#include "numbers.h"

UNARY(cvt_u64_u32, u64, u32, a)
UNARY(cvt_s64_s32, i64, i32, a)
UNARY(cvt_u32_u64, u32, u64, a)
UNARY(cvt_u32_u16, u32, u16, a)
UNARY(cvt_s32_s16, i32, i16, a)
UNARY(cvt_u16_u32, u16, u32, a)
UNARY(cvt_f32_s32, f32, i32, (f32)a)
UNARY(cvt_f32_u32, f32, u32, (f32)a)
UNARY(cvt_f32_f16, f32, u16, f16_to_f32(a))
UNARY(cvt_f32_bf16, f32, u16, bf16_to_f32(a))
UNARY(cvt_f16_f32, u16, f32, f32_to_f16(a))
UNARY(cvt_bf16_f32, u16, f32, f32_to_bf16(a))
UNARY(cvt_f64_f32, f64, f32, a)
UNARY(cvt_f32_f64, f32, f64, (f32)a)
UNARY(cvt_tf32_rna, u32, f32, f32_to_tf32(a, ROUND_AWAY))
UNARY(cvt_tf32_rn, u32, f32, f32_to_tf32(a, ROUND_NEAREST))
UNARY(cvt_tf32_rz, u32, f32, f32_to_tf32(a, ROUND_ZERO))
UNARY(cvt_tf32_relu, u32, f32, f32_to_tf32(a > 0 || a != a ? a : 0, ROUND_NEAREST))

/* Two f32 -> one packed register: the first operand goes to the upper half. */
BINARY(cvt_bf16x2_f32, u32, f32, f32, (u32)f32_to_bf16(a) << 16 | f32_to_bf16(b))
BINARY(cvt_f16x2_f32, u32, f32, f32, (u32)f32_to_f16(a) << 16 | f32_to_f16(b))
BINARY(cvt_bf16x2_rz_f32, u32, f32, f32, (u32)f32_to_bf16_rz(a) << 16 | f32_to_bf16_rz(b))

enum { CVT_SAT = 8, CVT_RELU = 16, CVT_FTZ = 32, CVT_INTEGRAL = 64 };
static inline f32 relu(f32 x, u32 flags) { return flags & CVT_RELU && !(x > 0) && x == x ? 0 : x; }
#define PAIR_ANY(name, D, shift, put) BINARY(name, D, f32, f32, ({ u32 flags = (u32)i->imm; int mode = flags & 7; \
  u32 hi = put(relu(a, flags)), lo = put(relu(b, flags)); (void)mode; (D)(hi << shift | lo); }))
#define PUT_BF16(x) f64_to_bf16(x, mode, flags & CVT_SAT)
#define PUT_F16(x) f64_to_f16(x, mode, flags & CVT_SAT)
#define PUT_UE8M0(x) f64_to_ue8m0(x, mode)
PAIR_ANY(cvt_bf16x2_any, u32, 16, PUT_BF16)
PAIR_ANY(cvt_f16x2_any, u32, 16, PUT_F16)
PAIR_ANY(cvt_e4m3x2_f32, u16, 8, f64_to_e4m3)
PAIR_ANY(cvt_e5m2x2_f32, u16, 8, f64_to_e5m2)
PAIR_ANY(cvt_e2m3x2_f32, u16, 8, f64_to_e2m3)
PAIR_ANY(cvt_e3m2x2_f32, u16, 8, f64_to_e3m2)
PAIR_ANY(cvt_e2m1x2_f32, u16, 4, f64_to_e2m1)
PAIR_ANY(cvt_ue8m0x2_f32, u16, 8, PUT_UE8M0)

/* Packed 16-bit pair -> packed narrow pair, and back. */
#define NARROW(name, get, put, shift) UNARY(name, u16, u32, ({ \
  u32 flags = (u32)i->imm; int mode = flags & 7; (void)mode; \
  u32 hi = put(relu(get((u16)(a >> 16)), flags)), lo = put(relu(get((u16)a), flags)); hi << shift | lo; }))
NARROW(cvt_e4m3x2_f16x2, f16_to_f32, f64_to_e4m3, 8)
NARROW(cvt_e5m2x2_f16x2, f16_to_f32, f64_to_e5m2, 8)
NARROW(cvt_e2m1x2_f16x2, f16_to_f32, f64_to_e2m1, 4)
NARROW(cvt_e4m3x2_bf16x2, bf16_to_f32, f64_to_e4m3, 8)
NARROW(cvt_e5m2x2_bf16x2, bf16_to_f32, f64_to_e5m2, 8)
NARROW(cvt_e2m1x2_bf16x2, bf16_to_f32, f64_to_e2m1, 4)
NARROW(cvt_ue8m0x2_bf16x2, bf16_to_f32, PUT_UE8M0, 8)

#define WIDEN(name, table, shift, bits, put) UNARY(name, u32, u16, ({ u32 flags = (u32)i->imm; \
  (u32)put(relu(table[a >> shift & bits], flags)) << 16 | put(relu(table[a & bits], flags)); }))
#define WIDEN_BOTH(from, table, shift, bits) WIDEN(cvt_f16x2_##from, table, shift, bits, f32_to_f16) \
  WIDEN(cvt_bf16x2_##from, table, shift, bits, f32_to_bf16)
WIDEN_BOTH(e4m3x2, table_e4m3, 8, 255)
WIDEN_BOTH(e5m2x2, table_e5m2, 8, 255)
WIDEN_BOTH(e2m3x2, table_e2m3, 8, 255)
WIDEN_BOTH(e3m2x2, table_e3m2, 8, 255)
WIDEN_BOTH(e2m1x2, table_e2m1, 4, 15)
WIDEN_BOTH(ue8m0x2, table_ue8m0, 8, 255)

/* Two signed bytes with six fractional bits (s2f6), each times its ue8m0 scale. */
static inline u32 widen_s2f6(u32 byte, u32 scale, u32 flags) {
  f64 x = (f64)(i8)byte / 64 * (f64)table_ue8m0[scale];
  return f64_to_bf16(flags & CVT_RELU && x < 0 ? 0 : x, ROUND_NEAREST, (flags & CVT_SAT) != 0);
}
BINARY(cvt_bf16x2_s2f6x2, u32, u16, u16, ({ u32 flags = (u32)i->imm; \
  widen_s2f6(a >> 8, b >> 8, flags) << 16 | widen_s2f6(a & 255, b & 255, flags); }))

/* Everything else. imm: flags | destination type << 8 | source type << 16 | destination row bytes << 24 | source row
 * bytes << 32. */
enum { T_S8, T_U8, T_S16, T_U16, T_S32, T_U32, T_S64, T_U64, T_F16, T_BF16, T_F32, T_F64 };
static const u8 type_bits[] = {8, 8, 16, 16, 32, 32, 64, 64, 16, 16, 32, 64};

static inline u64 load_row(const u8 *row, u32 bytes, int l) {
  u64 x = 0;
  memcpy(&x, row + bytes * (u32)l, bytes);
  return x;
}
static inline i64 as_integer(u64 x, int type) {
  switch (type) {
    case T_S8: return (i8)x;
    case T_U8: return (u8)x;
    case T_S16: return (i16)x;
    case T_U16: return (u16)x;
    case T_S32: return (i32)x;
    case T_U32: return (u32)x;
    default: return (i64)x;
  }
}
static inline f64 as_float(u64 x, int type) {
  return type == T_F16 ? f16_to_f32((u16)x) : type == T_BF16 ? bf16_to_f32((u16)x)
       : type == T_F32 ? f32_of((u32)x) : f64_of(x);
}
static inline f64 to_integral(f64 x, int mode) {
  return mode == ROUND_ZERO ? trunc(x) : mode == ROUND_DOWN ? floor(x) : mode == ROUND_UP ? ceil(x) : rint(x);
}
/* f64 -> integer with the clamping of the PTX ISA ("cvt": out-of-range values clamp, NaN becomes 0). */
static inline u64 float_to_integer(f64 x, int type) {
  int bits = type_bits[type], is_signed = !(type & 1);
  if (x != x) return 0;
  if (is_signed) {
    f64 top = ldexp(1, bits - 1);
    i64 lo = bits == 64 ? INT64_MIN : -(1ll << (bits - 1)), hi = bits == 64 ? INT64_MAX : (1ll << (bits - 1)) - 1;
    return (u64)(x >= top ? hi : x <= -top ? lo : (i64)x);
  }
  f64 top = ldexp(1, bits);
  return x >= top ? (bits == 64 ? ~0ull : (1ull << bits) - 1) : x <= 0 ? 0 : (u64)x;
}
static inline u64 float_bits(f64 x, int type, int mode, u32 flags) {
  static const int fe[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  if (flags & CVT_RELU && !(x > 0) && x == x) x = 0;
  if (flags & CVT_SAT && type >= T_F32) x = x > 0 ? (x > 1 ? 1 : x) : 0;
  if (type == T_F16) return f64_to_f16(x, mode, flags & CVT_SAT);
  if (type == T_BF16) return f64_to_bf16(x, mode, flags & CVT_SAT);
  if (type == T_F64) return bits_of64(x);
  int old = fegetround();
  fesetround(fe[mode & 3]);
  volatile f64 v = x;
  volatile f32 r = (f32)v;
  fesetround(old);
  return bits_of(flags & CVT_FTZ ? flush(r) : r);
}
static inline u64 convert_one(u64 x, int to, int from, int mode, u32 flags) {
  if (from >= T_F16) {
    f64 v = as_float(x, from);
    if (flags & CVT_FTZ && from == T_F32) v = flush((f32)v);
    if (flags & CVT_INTEGRAL) v = to_integral(v, mode);
    return to >= T_F16 ? float_bits(v, to, mode, flags) : float_to_integer(v, to);
  }
  i64 v = as_integer(x, from);
  if (to < T_F16) {
    if (flags & CVT_SAT) {
      __int128 wide = from == T_U64 ? (__int128)(u64)v : v;
      int bits = type_bits[to];
      __int128 lo = to & 1 ? 0 : -((__int128)1 << (bits - 1)), hi = ((__int128)1 << (bits - !(to & 1))) - 1;
      v = (i64)(wide < lo ? lo : wide > hi ? hi : wide);
    }
    return (u64)as_integer((u64)v, to);
  }
  if (to == T_F32) { /* one rounding from the full 64 bits */
    static const int fe[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    int old = fegetround();
    fesetround(fe[mode & 3]);
    volatile i64 s = v;
    volatile f32 r = from == T_U64 ? (f32)(u64)s : (f32)s;
    fesetround(old);
    return bits_of(r);
  }
  f64 d = from == T_U64 ? (f64)(u64)v : (f64)v;
  return float_bits(d, to, mode, flags);
}
OP(cvt_any) {
  (void)pred;
  u32 flags = (u32)i->imm & 255, db = (u32)(i->imm >> 24) & 255, sb = (u32)(i->imm >> 32) & 255;
  int to = (int)(i->imm >> 8) & 255, from = (int)(i->imm >> 16) & 255;
  u64 out[LANES];
  const u8 *s = ROW(u8, 1);
  for (int l = 0; l < LANES; l++) out[l] = convert_one(load_row(s, sb, l), to, from, (int)(flags & 7), flags);
  u8 *d = ROW(u8, 0);
  for (int l = 0; l < LANES; l++) memcpy(d + db * (u32)l, &out[l], db);
}
