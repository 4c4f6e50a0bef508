/* cp.async: one copy of 4 to 16 bytes per lane, from global to shared memory. Python decides when they happen. */
#include "core.h"

typedef struct copy_job {
  u64 from;
  u32 to, n;       /* shared address; bytes to read, the rest of the destination becomes zero */
} copy_job;

enum { READ_ALL, READ_COUNT, READ_UNLESS };

/* The jobs of one instruction, or -1. lists: destination and source (row, offset, wide), then the kind of the read
 * count (READ_*). The row of a count or the number of a predicate follows, and whether that is negated. */
EXPORT i32 core_copy_jobs(machine *M, warp *w, i32 pc, u32 m, copy_job *out) {
  const insn *i = M->insns + pc;
  const address_operand *to = (const address_operand *)(M->lists + i->list), *from = to + 1;
  const u32 *how = M->lists + i->list + 6;
  u32 size = i->size;
  i32 count = 0;
  for (u32 rest = m; rest; rest &= rest - 1) {
    int l = first_lane(rest);
    copy_job *j = &out[count++];
    *j = (copy_job){operand_address(w, from, l), (u32)operand_address(w, to, l), size};
    if (how[0] == READ_COUNT && WROW(u32, how[1])[l] < size) j->n = WROW(u32, how[1])[l];
    if (how[0] == READ_UNLESS && (w->pred[how[1]] >> l & 1) != how[2]) j->n = 0;
    if (j->to & (size - 1)) return fail(M, w, i, ERR_MISALIGNED, l, j->to, size), -1;
    if (j->n && j->from & (size - 1)) return fail(M, w, i, ERR_MISALIGNED, l, j->from, size), -1;
  }
  return count;
}

EXPORT int core_copy_track(machine *M, warp *w, i32 pc, const copy_job *jobs, i32 count, i32 agent, i32 clock,
                           const i32 *vc) {
  for (i32 k = 0; k < count; k++) {
    cta *c = shared_cta(M, w, M->insns + pc, jobs[k].to, -1);
    if (!c) return SYS_ERROR;
    core_shadow_bytes(M, c, jobs[k].to & OFFSET_MASK, M->insns[pc].size, TOUCH_WRITE, agent, clock, vc, pc);
  }
  return SYS_NEXT;
}

EXPORT int core_copy_run(machine *M, warp *w, i32 pc, const copy_job *jobs, i32 count) {
  const insn *i = M->insns + pc;
  u32 size = i->size;
  for (i32 k = 0; k < count; k++) {
    const copy_job *j = &jobs[k];
    u32 offset = j->to & OFFSET_MASK;
    cta *c = shared_cta(M, w, i, j->to, -1);
    if (!c) return SYS_ERROR;
    if (offset < SMEM_BASE || offset + size > c->smem_size) return fail(M, w, i, ERR_SHARED, -1, j->to, c->smem_size);
    u8 bytes[16] = {0};
    if (j->n && core_bulk_read(M, w, pc, j->from, bytes, j->n, NULL, 0, 0)) return SYS_ERROR;
    memcpy(c->smem + offset, bytes, size);
    if (c->init) memset(c->init + offset, 1, size);
  }
  M->progress++;
  return SYS_NEXT;
}
