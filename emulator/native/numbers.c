/* Decoding tables, filled when the library is loaded. */
#include "numbers.h"

f32 table_e4m3[256], table_e5m2[256], table_e2m1[256], table_e2m3[256], table_e3m2[256];
f32 table_ue8m0[256], table_ue4m3[256];
f32 table_f16[65536];

static f32 decode_bits(u32 code, int e, int m) {
  int bias = (1 << (e - 1)) - 1;
  u32 exponent = code >> m & ((1u << e) - 1), mantissa = code & ((1u << m) - 1);
  f64 v = exponent ? ldexp(1.0 + ldexp(mantissa, -m), (int)exponent - bias) : ldexp(mantissa, 1 - bias - m);
  return (f32)(code >> (e + m) & 1 ? -v : v);
}

__attribute__((constructor)) static void fill_tables(void) {
  for (u32 c = 0; c < 256; c++) {
    table_e4m3[c] = (c & 0x7f) == 0x7f ? NAN : decode_bits(c, 4, 3);
    table_ue4m3[c] = (c & 0x7f) == 0x7f ? NAN : decode_bits(c & 0x7f, 4, 3);
    table_e5m2[c] = (c & 0x7c) != 0x7c ? decode_bits(c, 5, 2) : c & 3 ? NAN : c & 0x80 ? -INFINITY : INFINITY;
    table_e2m1[c] = decode_bits(c & 15, 2, 1);
    table_e2m3[c] = decode_bits(c & 63, 2, 3);
    table_e3m2[c] = decode_bits(c & 63, 3, 2);
    table_ue8m0[c] = c == 255 ? NAN : (f32)ldexp(1.0, (int)c - 127);
  }
  for (u32 c = 0; c < 65536; c++)
    table_f16[c] = (c & 0x7c00) != 0x7c00 ? decode_bits(c, 5, 10) : c & 0x3ff ? NAN : c & 0x8000 ? -INFINITY : INFINITY;
}
