/* Matrix operands and products, shared by the tensor-core instructions. */
#ifndef HOPWELL_TENSOR_H
#define HOPWELL_TENSOR_H
#include "numbers.h"

/* An operand in shared memory. half_bytes: bytes per two elements, so that 4-bit formats have a size too. */
typedef struct operand {
  u64 descriptor;
  u32 mn, k_bytes;
  int k_major, half_bytes, blackwell;
  u32 format;
} operand;

enum { PACK_TIGHT, PACK_BYTE, PACK_CHUNK };
enum { CHUNKS_MOST = 256 * 8 };

i32 chunk_numbers(const operand *x, i32 *out);
enum { UNIT_WGMMA, UNIT_TCGEN05, UNIT_MMA };
enum { MODEL_K = 96 };
void matrix_product(machine *M, f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 step, u32 format,
                    u32 unit);
void core_gemm(f32 *acc, const f32 *a, const f32 *b, i32 m, i32 n, i32 k, i32 lda, i32 ldb, i32 ldc);
void core_gather(const u8 *smem, const i32 *chunks, i32 rows, i32 per_row, i32 format, i32 loose, f32 *out, i32 stride,
                 i32 transpose);
void core_load_accumulators(const u8 *file, const u32 *rows, i32 n, f32 *acc, i32 stride);
void core_store_accumulators(u8 *file, const u32 *rows, i32 n, const f32 *acc, i32 stride);
void core_load_accumulators_f16(const u8 *file, const u32 *rows, i32 n, f32 *acc, i32 stride);
void core_store_accumulators_f16(u8 *file, const u32 *rows, i32 n, const f32 *acc, i32 stride);
void core_load_a(const u8 *file, const u32 *rows, i32 n_regs, i32 format, f32 *out, i32 stride);
void core_shadow_chunks(machine *M, cta *c, const i32 *chunks, i32 n, u32 touch, i32 agent, i32 clock, const i32 *vc,
                        i32 pc);

#endif
