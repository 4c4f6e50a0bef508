/* Helpers for per-lane instructions: each is one loop over the 32 lanes that the compiler turns into vector code.
 * A lane function always computes all lanes; the run loop keeps the old values of lanes that are switched off. */
#ifndef HOPWELL_LANE_H
#define HOPWELL_LANE_H
#include "core.h"

#define OP(name) EXPORT void op_##name(u8 *restrict file, u32 *restrict pred, const insn *restrict i)
#define UNUSED (void)file, (void)pred, (void)i

/* d = f(a), f(a, b), f(a, b, c) with element types D, A, B, C. */
#define UNARY(name, D, A, expr) \
  OP(name) { (void)pred; D *d = ROW(D, 0); const A *a_ = ROW(A, 1); LOOP { A a = a_[l]; d[l] = (D)(expr); } }
#define BINARY(name, D, A, B, expr) \
  OP(name) { (void)pred; D *d = ROW(D, 0); const A *a_ = ROW(A, 1); const B *b_ = ROW(B, 2); \
    LOOP { A a = a_[l]; B b = b_[l]; d[l] = (D)(expr); } }
#define TERNARY(name, D, A, B, C, expr) \
  OP(name) { (void)pred; D *d = ROW(D, 0); const A *a_ = ROW(A, 1); const B *b_ = ROW(B, 2); const C *c_ = ROW(C, 3); \
    LOOP { A a = a_[l]; B b = b_[l]; C c = c_[l]; d[l] = (D)(expr); } }

/* 32 bytes of 0 or 1 -> lane mask, eight at a time: the multiplication moves the bit of byte k to bit 56 + k. */
static inline u32 mask_of(const u8 *flags) {
  u32 m = 0;
  for (int k = 0; k < 4; k++) {
    u64 x;
    memcpy(&x, flags + 8 * k, 8);
    m |= (u32)(x * 0x0102040810204080ull >> 56) << (8 * k);
  }
  return m;
}

static inline f32 f32_of(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline u32 bits_of(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline f64 f64_of(u64 x) { f64 y; memcpy(&y, &x, 8); return y; }
static inline u64 bits_of64(f64 x) { u64 y; memcpy(&y, &x, 8); return y; }

#endif
