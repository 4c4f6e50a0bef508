/* Integer, logic and predicate instructions. */
#include "lane.h"

#define ALL_WIDTHS(M) M(16, u16, i16) M(32, u32, i32) M(64, u64, i64)

#define ARITH(w, U, S) \
  BINARY(add_b##w, U, U, U, a + b) \
  BINARY(sub_b##w, U, U, U, a - b) \
  BINARY(mul_lo_b##w, U, U, U, (u64)a * (u64)b) \
  TERNARY(mad_lo_b##w, U, U, U, U, (u64)a * (u64)b + (u64)c) \
  BINARY(and_b##w, U, U, U, a & b) \
  BINARY(or_b##w, U, U, U, a | b) \
  BINARY(xor_b##w, U, U, U, a ^ b) \
  UNARY(not_b##w, U, U, ~a) \
  UNARY(cnot_b##w, U, U, a == 0) \
  UNARY(neg_s##w, U, U, (U)0 - a) \
  UNARY(abs_s##w, U, S, a < 0 ? (U)0 - (U)a : (U)a) \
  BINARY(min_s##w, S, S, S, a < b ? a : b) \
  BINARY(max_s##w, S, S, S, a < b ? b : a) \
  BINARY(min_u##w, U, U, U, a < b ? a : b) \
  BINARY(max_u##w, U, U, U, a < b ? b : a) \
  BINARY(shl_b##w, U, U, u32, b < w ? a << (b & (w - 1)) : 0) \
  BINARY(shr_u##w, U, U, u32, b < w ? a >> (b & (w - 1)) : 0) \
  BINARY(shr_s##w, S, S, u32, a >> (b < w ? b & (w - 1) : w - 1)) \
  BINARY(div_u##w, U, U, U, b ? a / (b ? b : 1) : (U)~(U)0) \
  BINARY(rem_u##w, U, U, U, b ? a % (b ? b : 1) : a) \
  BINARY(div_s##w, S, S, S, b == 0 ? -1 : b == -1 ? (S)((U)0 - (U)a) : a / b) \
  BINARY(rem_s##w, S, S, S, b == 0 ? a : b == -1 ? 0 : a % b) \
  UNARY(mov_b##w, U, U, a)
ALL_WIDTHS(ARITH)

BINARY(min_relu_s32, i32, i32, i32, (a < b ? a : b) < 0 ? 0 : (a < b ? a : b))
BINARY(max_relu_s32, i32, i32, i32, (a < b ? b : a) < 0 ? 0 : (a < b ? b : a))
BINARY(add_sat_s32, i32, i32, i32,
       ((i64)a + b > INT32_MAX ? INT32_MAX : (i64)a + b < INT32_MIN ? INT32_MIN : (i64)a + b))
BINARY(sub_sat_s32, i32, i32, i32,
       ((i64)a - b > INT32_MAX ? INT32_MAX : (i64)a - b < INT32_MIN ? INT32_MIN : (i64)a - b))

#define WIDE(t, W, N) \
  BINARY(mul_wide_##t, W, N, N, (W)a * (W)b) \
  TERNARY(mad_wide_##t, W, N, N, W, (W)a * (W)b + c)
WIDE(u16, u32, u16)
WIDE(s16, i32, i16)
WIDE(u32, u64, u32)
WIDE(s32, i64, i32)

#define HIGH(t, T, W, bits) \
  BINARY(mul_hi_##t, T, T, T, ((W)a * (W)b) >> bits) \
  TERNARY(mad_hi_##t, T, T, T, T, (T)(((W)a * (W)b) >> bits) + c)
HIGH(u16, u16, u32, 16)
HIGH(s16, i16, i32, 16)
HIGH(u32, u32, u64, 32)
HIGH(s32, i32, i64, 32)
HIGH(u64, u64, unsigned __int128, 64)
HIGH(s64, i64, __int128, 64)

BINARY(mul24_lo_u32, u32, u32, u32, (a & 0xffffff) * (b & 0xffffff))
TERNARY(sad_u32, u32, u32, u32, u32, c + (a < b ? b - a : a - b))
TERNARY(sad_s32, u32, i32, i32, u32, c + (a < b ? (u32)b - (u32)a : (u32)a - (u32)b))

/* Packed 16-bit pairs. */
#define PAIR16(name, T, expr) OP(name) { (void)pred; T *d = ROW(T, 0); const T *a_ = ROW(T, 1), *b_ = ROW(T, 2); \
  _Pragma("GCC ivdep") for (int l = 0; l < 2 * LANES; l++) { T a = a_[l], b = b_[l]; d[l] = (T)(expr); } }
PAIR16(add_b16x2, u16, a + b)
PAIR16(min_s16x2, i16, a < b ? a : b)
PAIR16(max_s16x2, i16, a < b ? b : a)
PAIR16(min_u16x2, u16, a < b ? a : b)
PAIR16(max_u16x2, u16, a < b ? b : a)

/* Carry chains keep the carry in a predicate that the decoder reserves: o[4] in, o[5] out. */
#define CARRY(name, T, W, bits, first, second) OP(name) { \
  T *d = ROW(T, 0); const T *a = ROW(T, 1), *b = ROW(T, 2); \
  u32 in = i->o[4] == NONE ? 0 : pred[i->o[4]], out = 0; \
  for (int l = 0; l < LANES; l++) { \
    W x = (W)a[l] first b[l] second (in >> l & 1); d[l] = (T)x; out |= (u32)(x >> bits & 1) << l; } \
  if (i->o[5] != NONE) pred[i->o[5]] = out; }
CARRY(addc_b32, u32, u64, 32, +, +)
CARRY(addc_b64, u64, unsigned __int128, 64, +, +)
CARRY(subc_b32, u32, u64, 32, -, -)
CARRY(subc_b64, u64, unsigned __int128, 64, -, -)

/* shf: the 64-bit value {b:a} shifted; .clamp limits the shift to 32, .wrap takes it modulo 32. */
TERNARY(shf_l_wrap_b32, u32, u32, u32, u32, (u32)(((((u64)b << 32) | a) << (c & 31)) >> 32))
TERNARY(shf_r_wrap_b32, u32, u32, u32, u32, (u32)((((u64)b << 32) | a) >> (c & 31)))
TERNARY(shf_l_clamp_b32, u32, u32, u32, u32, c >= 32 ? a : (u32)(((((u64)b << 32) | a) << (c & 31)) >> 32))
TERNARY(shf_r_clamp_b32, u32, u32, u32, u32, c >= 32 ? b : (u32)((((u64)b << 32) | a) >> (c & 31)))

static inline u32 permute(u32 a, u32 b, u32 c) {
  u64 v = ((u64)b << 32) | a;
  u32 r = 0;
  for (int k = 0; k < 4; k++) {
    u32 s = c >> (4 * k) & 15, x = (u32)(v >> (8 * (s & 7))) & 255;
    if (s & 8) x = x & 0x80 ? 255 : 0;
    r |= x << (8 * k);
  }
  return r;
}
TERNARY(prmt_b32, u32, u32, u32, u32, permute(a, b, c))

/* The six named modes of prmt (PTX ISA, "prmt"): byte selectors as a function of c & 3. */
OP(prmt_mode_b32) {
  static const u16 table[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123}, {0x0000, 0x1111, 0x2222, 0x3333},
      {0x3210, 0x3211, 0x3222, 0x3333}, {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  (void)pred;
  u32 *d = ROW(u32, 0);
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3);
  LOOP d[l] = permute(a[l], b[l], table[i->imm][c[l] & 3]);
}

OP(lop3_b32) {
  (void)pred;
  u32 *d = ROW(u32, 0);
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3);
  u32 t[8];
  for (int k = 0; k < 8; k++) t[k] = i->imm >> k & 1 ? FULL : 0;
  LOOP {
    u32 x = a[l], y = b[l], z = c[l];
    d[l] = (x & y & z & t[7]) | (x & y & ~z & t[6]) | (x & ~y & z & t[5]) | (x & ~y & ~z & t[4]) |
           (~x & y & z & t[3]) | (~x & y & ~z & t[2]) | (~x & ~y & z & t[1]) | (~x & ~y & ~z & t[0]);
  }
}

static inline u64 low_bits(u32 n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

/* bfe: bits past the most significant bit read as zero (unsigned) or as the sign bit (PTX ISA, "bfe"). */
static inline u64 extract(u64 a, u32 pos, u32 len, int bits, int sign) {
  pos &= 255, len &= 255;
  u64 v = pos < 64 ? a >> pos : 0;
  if (!sign) return len ? v & low_bits(len) : 0;
  if (!len) return 0;
  u32 top = pos + len - 1 < (u32)bits - 1 ? pos + len - 1 : (u32)bits - 1;
  u64 s = a >> top & 1 ? ~0ull : 0;
  u32 kept = pos < (u32)bits ? (len < bits - pos ? len : bits - pos) : 0;
  return (v & low_bits(kept)) | (s & ~low_bits(kept));
}
TERNARY(bfe_u32, u32, u32, u32, u32, extract(a, b, c, 32, 0))
TERNARY(bfe_s32, u32, u32, u32, u32, extract(a, b, c, 32, 1))
TERNARY(bfe_u64, u64, u64, u32, u32, extract(a, b, c, 64, 0))
TERNARY(bfe_s64, u64, u64, u32, u32, extract(a, b, c, 64, 1))

#define INSERT(w, U) OP(bfi_b##w) { (void)pred; U *d = ROW(U, 0); const U *a = ROW(U, 1), *b = ROW(U, 2); \
  const u32 *c = ROW(u32, 3), *e = ROW(u32, 4); \
  LOOP { u32 pos = c[l] & 255, len = e[l] & 255; U m = pos < w ? (U)(low_bits(len) << pos) : 0; \
    d[l] = (b[l] & ~m) | ((pos < w ? a[l] << pos : 0) & m); } }
INSERT(32, u32)
INSERT(64, u64)

#define COUNTS(w, U, pop, clz) \
  UNARY(popc_b##w, u32, U, pop(a)) \
  UNARY(clz_b##w, u32, U, a ? clz(a) : w) \
  UNARY(bfind_u##w, u32, U, a ? (u32)(w - 1 - clz(a)) : NONE)
COUNTS(32, u32, __builtin_popcount, __builtin_clz)
COUNTS(64, u64, __builtin_popcountll, __builtin_clzll)
UNARY(bfind_s32, u32, i32, ({ u32 x = a < 0 ? ~(u32)a : (u32)a; x ? (u32)(31 - __builtin_clz(x)) : NONE; }))
UNARY(bfind_s64, u32, i64, ({ u64 x = a < 0 ? ~(u64)a : (u64)a; x ? (u32)(63 - __builtin_clzll(x)) : NONE; }))
UNARY(bfind_shift_u32, u32, u32, a ? (u32)__builtin_clz(a) : NONE)

static inline u64 reverse(u64 x) {
  x = __builtin_bswap64(x);
  x = (x >> 4 & 0x0f0f0f0f0f0f0f0f) | (x & 0x0f0f0f0f0f0f0f0f) << 4;
  x = (x >> 2 & 0x3333333333333333) | (x & 0x3333333333333333) << 2;
  return (x >> 1 & 0x5555555555555555) | (x & 0x5555555555555555) << 1;
}
UNARY(brev_b32, u32, u32, reverse(a) >> 32)
UNARY(brev_b64, u64, u64, reverse(a))

/* fns: position of the n-th set bit from base b; n = c (PTX ISA, "fns"). */
static inline u32 find_nth(u32 mask, u32 base, i32 n) {
  if (base >= 32) return NONE;
  if (n == 0) return mask >> base & 1 ? base : NONE;
  i32 left = n < 0 ? -n : n;
  for (i32 p = (i32)base; p >= 0 && p < 32; p += n < 0 ? -1 : 1)
    if (mask >> p & 1 && --left == 0) return (u32)p;
  return NONE;
}
TERNARY(fns_b32, u32, u32, u32, i32, find_nth(a, b, c))

#define DOT(name, A, B) TERNARY(dp4a_##name, u32, u32, u32, u32, ({ i32 s = (i32)c; \
  for (int k = 0; k < 4; k++) s += (i32)(A)(a >> 8 * k) * (i32)(B)(b >> 8 * k); (u32)s; }))
DOT(s32_s32, i8, i8)
DOT(u32_u32, u8, u8)
DOT(s32_u32, i8, u8)
DOT(u32_s32, u8, i8)

/* Moves between registers of different width (mov.b64 {a, b}, c and back; also 16- and 128-bit parts). */
#define PARTS 4
#define UNPACK(name, W, N, n) OP(name) { (void)pred; const W *s = ROW(W, 1); W v[LANES]; memcpy(v, s, sizeof v); \
  static const u8 at[PARTS] = {0, 2, 3, 4}; \
  for (int k = 0; k < n; k++) if (i->o[at[k]] != NONE) { N *d = (N *)(file + i->o[at[k]]); \
    LOOP d[l] = (N)(v[l] >> (8 * sizeof(N) * k)); } }
#define PACK(name, W, N, n) OP(name) { (void)pred; W v[LANES]; \
  for (int k = 0; k < n; k++) { const N *s = (const N *)(file + i->o[1 + k]); \
    LOOP v[l] = (k ? v[l] : 0) | (W)s[l] << (8 * sizeof(N) * k); } \
  memcpy(ROW(W, 0), v, sizeof v); }
typedef unsigned __int128 u128;
UNPACK(unpack_b64_b32, u64, u32, 2)
UNPACK(unpack_b32_b16, u32, u16, 2)
UNPACK(unpack_b64_b16, u64, u16, 4)
UNPACK(unpack_b32_b8, u32, u16, 4)
UNPACK(unpack_b16_b8, u16, u16, 2)
UNPACK(unpack_b128_b64, u128, u64, 2)
UNPACK(unpack_b128_b32, u128, u32, 4)
PACK(pack_b64_b32, u64, u32, 2)
PACK(pack_b32_b16, u32, u16, 2)
PACK(pack_b64_b16, u64, u16, 4)
PACK(pack_b128_b64, u128, u64, 2)
PACK(pack_b128_b32, u128, u32, 4)
UNARY(mov_b128, u128, u128, a)

/* Bytes live in 16-bit registers, so packing them needs a mask and unpacking a different stride. */
OP(pack_b32_b8) {
  (void)pred;
  u32 v[LANES];
  for (int k = 0; k < 4; k++) {
    const u16 *s = (const u16 *)(file + i->o[1 + k]);
    LOOP v[l] = (k ? v[l] : 0) | (u32)(s[l] & 255) << (8 * k);
  }
  memcpy(ROW(u32, 0), v, sizeof v);
}
OP(split_b32_b8) {
  (void)pred;
  static const u8 at[PARTS] = {0, 2, 3, 4};
  u32 v[LANES];
  memcpy(v, ROW(u32, 1), sizeof v);
  for (int k = 0; k < 4; k++)
    if (i->o[at[k]] != NONE) { u16 *d = (u16 *)(file + i->o[at[k]]); LOOP d[l] = v[l] >> (8 * k) & 255; }
}
OP(split_b16_b8) {
  (void)pred;
  u16 v[LANES];
  memcpy(v, ROW(u16, 1), sizeof v);
  if (i->o[0] != NONE) { u16 *d = ROW(u16, 0); LOOP d[l] = v[l] & 255; }
  if (i->o[2] != NONE) { u16 *d = ROW(u16, 2); LOOP d[l] = v[l] >> 8; }
}
BINARY(pack_b16_b8, u16, u16, u16, (a & 255) | b << 8)

/* Selection: the condition is a predicate number in o[3]. */
#define SELECT(w, U) OP(selp_b##w) { U *d = ROW(U, 0); const U *a = ROW(U, 1), *b = ROW(U, 2); u32 p = pred[i->o[3]]; \
  LOOP d[l] = p >> l & 1 ? a[l] : b[l]; }
SELECT(16, u16)
SELECT(32, u32)
SELECT(64, u64)
TERNARY(slct_b32_s32, u32, u32, u32, i32, c >= 0 ? a : b)
TERNARY(slct_b32_f32, u32, u32, u32, f32, c >= 0 ? a : b)
TERNARY(slct_b64_s32, u64, u64, u64, i32, c >= 0 ? a : b)

/* Predicates: o[0], o[5] destinations; o[1], o[2] sources. imm bits 0 and 1 negate a source. */
static inline u32 source_pred(const u32 *pred, const insn *i, int k) {
  u32 v = pred[i->o[k]];
  return i->imm >> (k - 1) & 1 ? ~v : v;
}
OP(and_pred) { (void)file; pred[i->o[0]] = source_pred(pred, i, 1) & source_pred(pred, i, 2); }
OP(or_pred) { (void)file; pred[i->o[0]] = source_pred(pred, i, 1) | source_pred(pred, i, 2); }
OP(xor_pred) { (void)file; pred[i->o[0]] = source_pred(pred, i, 1) ^ source_pred(pred, i, 2); }
OP(not_pred) { (void)file; pred[i->o[0]] = ~source_pred(pred, i, 1); }
OP(mov_pred) { (void)file; pred[i->o[0]] = source_pred(pred, i, 1); }
OP(set_pred) { (void)file; pred[i->o[0]] = i->imm ? FULL : 0; }

/* setp: o[0] and o[5] receive (cmp BOOL c) and (!cmp BOOL c); imm: 0 none, 1 and, 2 or, 3 xor, +4 negated c. */
void store_compare(u32 *pred, const insn *i, u32 yes) {
  u32 no = ~yes, mode = i->imm & 3;
  if (mode) {
    u32 c = pred[i->o[3]];
    if (i->imm & 4) c = ~c;
    yes = mode == 1 ? yes & c : mode == 2 ? yes | c : yes ^ c;
    no = mode == 1 ? no & c : mode == 2 ? no | c : no ^ c;
  }
  if (i->o[0] != NONE) pred[i->o[0]] = yes;
  if (i->o[5] != NONE) pred[i->o[5]] = no;
}
#define COMPARE(name, T, expr) OP(setp_##name) { const T *a_ = ROW(T, 1), *b_ = ROW(T, 2); u8 r[LANES]; \
  LOOP { T a = a_[l], b = b_[l]; r[l] = (expr); } store_compare(pred, i, mask_of(r)); }
#define COMPARES(t, T) COMPARE(eq_##t, T, a == b) COMPARE(ne_##t, T, a != b) COMPARE(lt_##t, T, a < b) \
  COMPARE(le_##t, T, a <= b) COMPARE(gt_##t, T, a > b) COMPARE(ge_##t, T, a >= b)
COMPARES(s16, i16)
COMPARES(u16, u16)
COMPARES(s32, i32)
COMPARES(u32, u32)
COMPARES(s64, i64)
COMPARES(u64, u64)
