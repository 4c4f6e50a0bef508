/* Shared-memory matrix descriptors of wgmma and tcgen05 -> numbers of the 16-byte chunks that hold the operand.
 *
 * Fields are in units of 16 bytes. See PTX ISA, "matrix descriptor format" of wgmma and of tcgen05, and CUTLASS
 * mma_sm90_desc.hpp and mma_sm100_desc.hpp.
 *     [13:0]   start                            [29:16]  leading byte offset LBO
 *     [45:32]  stride byte offset SBO           [51:49]  base offset
 *     [63:62]  swizzle on Hopper: 1, 2, 3 = 128, 64, 32 bytes
 *     [63:61]  swizzle on Blackwell: 2, 4, 6    [48:46]  1 on Blackwell
 * Bit 52 of Blackwell: LBO is the address at which rows of 48 bytes go on behind the end of their 128 bytes.
 *
 * With T elements per chunk and a swizzle atom W chunks wide (1, 2, 4 or 8), the canonical layouts of CUTLASS's
 * mma_traits_sm90_gmma.hpp are
 *
 *   K-major   row r, chunk c    (r % 8) W + (r / 8) SBO + c                    no swizzle: c LBO instead of c
 *   MN-major  chunk c, k        c % W + (c / W) LBO + (k % 8) W + (k / 8) SBO  no swizzle: c SBO + k % 8 + (k / 8) LBO
 *
 * The XOR swizzle acts on absolute address bits. So a start address inside an atom works as on hardware. Every kernel
 * advances K by 32 bytes in this way. */
#include "tensor.h"

static int swizzle_width(u64 descriptor, int blackwell) {
  static const u8 hopper[4] = {1, 8, 4, 2}, b200[8] = {1, 0, 8, 0, 4, 0, 2, 0};
  return blackwell ? b200[descriptor >> 61] : hopper[descriptor >> 62];
}

/* K-major: [mn][k_bytes / 16]. MN-major: [k][mn * element / 16]. Returns how many; -1 for a layout that is not
 * emulated. */
i32 chunk_numbers(const operand *x, i32 *out) {
  u64 d = x->descriptor;
  i32 start = (i32)(d & 0x3fff), lbo = (i32)(d >> 16 & 0x3fff), sbo = (i32)(d >> 32 & 0x3fff), n = 0;
  i32 width = swizzle_width(d, x->blackwell), mask = width - 1;
  i32 next = x->blackwell && (d >> 52 & 1), column = start & mask;
  if (!width || d >> 49 & 7 || (x->blackwell && (d >> 46 & 7) != 1)) return -1;
  if (x->k_bytes == 48 ? width != 8 || !x->k_major || (column > 5 && !next) : next) return -1;
  i32 rows = (i32)(x->k_major ? x->mn : x->k_bytes * 2 / (u32)x->half_bytes);
  i32 per_row = (i32)(x->k_major ? x->k_bytes / 16 : x->mn * (u32)x->half_bytes / 32);
  for (i32 r = 0; r < rows; r++)
    for (i32 c = 0; c < per_row; c++) {
      i32 at;
      if (x->k_major) at = r % 8 * width + r / 8 * sbo + (width == 1 ? c * lbo : c);
      else if (width == 1) at = c * sbo + r % 8 + r / 8 * lbo;
      else at = c % width + c / width * lbo + r % 8 * width + r / 8 * sbo;
      at += next && column + c >= width ? lbo + column - width : start;
      out[n++] = (at ^ (at >> 3 & mask)) & 0x3fff; /* 14 address bits in units of 16 bytes: addresses wrap at 256 KiB */
    }
  return n;
}

EXPORT i32 core_chunks(u64 descriptor, u32 mn, u32 k_bytes, i32 k_major, i32 half_bytes, i32 blackwell, i32 *out) {
  operand x = {descriptor, mn, k_bytes, k_major, half_bytes, blackwell, 0};
  return chunk_numbers(&x, out);
}
