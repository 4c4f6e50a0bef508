/* State of the emulated machine and the interface between the native core and Python.
 *
 * layout.py mirrors the structures below field by field. Python compares sizes and offsets by core_layout() when it
 * loads the library, so the two cannot drift apart silently. */
#ifndef HOPWELL_CORE_H
#define HOPWELL_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

#define LANES 32
#define FULL 0xffffffffu
#define NONE 0xffffffffu
#define EXPORT __attribute__((visibility("default")))
#define LOOP _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)

/* Shared-memory addresses are 32 bits: CTA rank in the cluster << 24 | offset in that CTA. On sm_90 and later the
 * first KiB belongs to the system (CUDA programming guide, "reserved shared memory per block"). User allocations
 * therefore start at 1024. Generic addresses mark their window in bits 56..58. */
enum { SMEM_BASE = 1024, RANK_SHIFT = 24, OFFSET_MASK = 0xffffff, MAX_RANKS = 16 };
enum { SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED, SPACE_LOCAL, SPACE_PARAM };
#define WINDOW_SHIFT 56

/* Actions of the run loop for an instruction. */
enum { KIND_LANE, KIND_BRANCH, KIND_EXIT, KIND_SYSTEM, KIND_PYTHON, KIND_NOP };

/* Kinds of operand rows, for masked writes and register checks. A row starts at a multiple of 64 bytes. */
enum { ROW_NONE, ROW_16, ROW_32, ROW_64, ROW_128, ROW_PRED };

typedef struct insn {
  void *fn;        /* lane_fn or system_fn */
  u32 o[6];        /* byte offsets of operand rows in the register file, or predicate numbers: d, a, b, c, e, d2 */
  i64 imm;
  u32 list;        /* first entry of this instruction's operand list in machine.lists (vector operands) */
  u32 refs;        /* first entry in machine.refs: sources, then destinations, each ROW_* << 28 | row offset */
  u16 n_list, n_use, n_def;
  i16 guard;       /* predicate number or -1 */
  i32 target;      /* branch target */
  u8 kind, guard_not, pad[2];
  u8 space, size, vec, aux;
} insn;

/* insn.aux of lane instructions: a move of a register (packing and unpacking included), which ptxas
 * implements by renaming, or of a constant. */
enum { AUX_MOVE = 1 };
/* insn.aux of memory instructions. Strong accesses (atomic, volatile, relaxed, acquire, release) synchronise. */
enum { AUX_ADDR64 = 1, AUX_SIGNED = 2, AUX_ACQUIRE = 4, AUX_RELEASE = 8, AUX_STRONG = 16 };

/* Why a fragment waits. WAIT_TRY is a suspended mbarrier.try_wait, which may also time out. */
enum { WAIT_NO, WAIT_WORD, WAIT_TRY, WAIT_CONVERGE, WAIT_PYTHON };

/* Lanes of one warp that share a program counter. */
typedef struct frag {
  i32 pc;
  u32 mask;
  u32 wait, state; /* state: small memory of an instruction that is executed again after its wait */
  const u32 *word; /* WAIT_WORD, WAIT_TRY: ready when *word != old */
  u32 old;
  u32 want;        /* WAIT_CONVERGE: lanes that must be in this fragment */
  i32 info[2];     /* for the deadlock report: barrier number or mbarrier (rank << 24 | offset), parity */
} frag;

struct machine;
struct cta;

enum { TOUCHED_WRITTEN = 1, TOUCHED_READ = 2 };
enum { BUSY_NO, BUSY_WRITTEN /* by wgmma */, BUSY_READ /* by wgmma */, BUSY_LOAD /* tcgen05.ld */ };

typedef struct warp {
  u8 *file;        /* register rows; constants and special registers are rows too */
  u32 *pred;       /* one 32-lane mask per predicate register */
  u32 *written;    /* strict mode: lanes written, per register slot (row offset / 64) */
  u8 *busy;        /* per slot: BUSY_* while an asynchronous operation owns the register */
  u8 *touched;     /* per slot: TOUCHED_* by ordinary instructions since the last wgmma.fence */
  u32 *origin;     /* per slot: the slot that it copies, plus one; 0 if it copies none */
  u8 *local;       /* local memory, lane-major */
  struct cta *cta;
  i32 *vc;         /* vector clock of WARP_PARTS parts */
  i64 executed;
  void *horizon;   /* what is known of other clusters (global_shadow.c) */
  i32 *fenced;     /* clocks that relaxed arrivals release; NULL: nothing yet */
  i32 *unfenced;   /* clocks that relaxed waits have seen; NULL: nothing yet */
  void *arrived_at; /* mbarrier of the latest arrivals in parts, see sync.c */
  i32 id, threads, n_frags, agent;
  u32 n_busy;
  u32 accessors;   /* lanes that accessed memory together since the lanes of the warp last synchronised */
  i32 synced;      /* the warp's clock then */
  i32 solo;        /* agent of a lane that acts alone, see clock_cut; solo_lanes and solo_synced belong to it */
  u32 solo_lanes;
  i32 solo_synced;
  i32 actor;       /* agent or solo: who makes the current access */
  u32 arrived, arrived_of; /* lanes that have arrived there, and lanes with accesses before the first part */
  i32 arrived_clock, arrived_solo; /* clocks of the warp and of solo then */
  i32 tensor_loads, tensor_stores; /* agents of its tcgen05.ld and tcgen05.st, 0: none yet */
  u32 fenced_before, fenced_after; /* lanes that have executed tcgen05.fence since all lanes last had */
  u32 wgmma_fences;
  u32 live;        /* lanes that have not exited */
  u32 turn;        /* which runnable fragment goes first after a full time slice */
  u32 cluster_phase, cluster_arrived;
  frag frags[LANES];
} warp;

typedef struct mbarrier {
  u32 phase;       /* completed phases */
  i32 count, pending;
  u32 offset;
  i64 tx;
  i32 *vc;         /* clock of arrivals in the current phase, then of the completed phases (SHARED_PARTS each) */
  i32 agent;
  u32 alive;
  u32 tx_phase;    /* last phase that carried transactions, and last phase seen by a wait */
  u32 seen_phase;
  u32 horizon;     /* what arrivals knew of other clusters: number of a variable, see global_shadow.c; 0: nothing */
} mbarrier;

typedef struct named_barrier {
  u32 generation;
  i32 arrived, expected;
  i32 whole;       /* used without a thread count: exited warps count as arrived */
  u32 reduce_popc, reduce_and, reduce_or; /* of the arrivals so far */
  u32 result_popc, result_and, result_or; /* of the last completed generation, until the slowest warp has read them */
  u32 warps;       /* that arrived in this generation */
  i32 site;        /* the instruction at which the first of them waits, counted from 1; 0: nobody waits */
  u32 horizon;     /* as of an mbarrier */
  i32 *vc;
} named_barrier;

typedef struct cell_clock {
  i32 clock;
  u32 pc;          /* instruction | lane of actor.lane << 22 | bytes of the cell that were read << 28 */
} cell_clock;

/* Last accesses of each agent, allocated at its first one: [agent][cell]. */
typedef struct last_accesses {
  u32 n;
  i32 *agents;
  cell_clock **cells;
} last_accesses;
/* Last accesses of each cell (4 bytes of memory; 16 lanes x 1 column of tensor memory). */
typedef struct shadow {
  u32 cells;
  i32 *w_agent;    /* meaningful where w_bytes is not 0 */
  i32 *w_clock;
  i32 *w_pc;
  u8 *w_lane;      /* who in the warp, see actor.lane */
  u8 *w_bytes;     /* low nibble: bytes of the cell; bit 4: written through the generic proxy */
  last_accesses readers, atomics; /* weak and strong reads; atomic operations and strong writes */
} shadow;

enum { MAX_MBARRIERS = 512 };

typedef struct cta {
  u8 *smem;
  u8 *init;        /* strict mode: byte of shared memory ever written */
  u16 *mbar_slot;  /* offset / 8 -> index + 1 into mbars */
  struct cluster *cluster;
  warp *warps;
  shadow *shadow, *tmem_shadow;
  cell_clock *incoming; /* per agent: the last thing it has sent to this CTA from another, see exit.c */
  mbarrier *mbars;
  struct warpgroup **groups; /* wgmma.c */
  u32 smem_size, rank;
  i32 n_warps, n_mbars;
  u32 id[3], exited;
  i32 live_warps, pad;
  named_barrier bars[16];
} cta;

typedef struct cluster {
  cta *ctas[MAX_RANKS];
  i32 *vc;         /* arrivals, then released clock (SHARED_PARTS each) */
  u32 n_ctas, phase;
  i32 arrived, n_warps, live_warps, index;
  u32 origin[3];
  i32 n_agents;
} cluster;

typedef struct region {
  u64 base, size;
  u8 *host;
  u8 *written;     /* one byte per byte when the region is tracked */
  u64 stores;      /* accesses that wrote it */
  u32 flags;       /* REGION_* */
  u32 id;
  struct global_shadow *shadow;
} region;
enum { REGION_READONLY = 1, REGION_TRACK = 2, REGION_FRESH = 4 };

/* Errors and detector reports; formatted in Python. */
enum {
  ERR_NONE, ERR_GLOBAL, ERR_SHARED, ERR_MISALIGNED, ERR_MIXED_SPACE, ERR_RANK, ERR_MBAR_INIT, ERR_MBAR_OVERFLOW,
  ERR_MBAR_EXITED, ERR_BARRIER_COUNT, ERR_BARRIER_OVERFLOW, ERR_SHFL_LANE, ERR_TRAP, ERR_UNSUPPORTED, ERR_READONLY,
  ERR_UNINIT_REG, ERR_UNINIT_SHARED, ERR_UNINIT_GLOBAL, ERR_IN_FLIGHT, ERR_CLUSTER_BARRIER, ERR_LOCAL, ERR_MBAR_COUNT,
  ERR_MBAR_MISALIGNED, ERR_MBAR_MEMORY, ERR_TX_RANGE, ERR_AGENTS, ERR_PARAM, ERR_BARRIER_ID, ERR_WGMMA_FENCE,
  ERR_WGMMA_GROUP, ERR_WGMMA_DISAGREE, ERR_DESCRIPTOR, ERR_TMA_EXITED, ERR_TMA_RANK
};

typedef struct fault {
  i32 code, pc, warp, lane;
  u64 address, extra, extra2;
  i32 cta[3], rank;
} fault;

enum { HAZARD_RACE, HAZARD_PROXY, HAZARD_GLOBAL, HAZARD_BARRIER, HAZARD_SITE, HAZARD_TENSOR_FENCE, HAZARD_EXIT };

typedef struct hazard {
  i32 kind, write, other_write, pc, other_pc, agent, other_agent, tmem, rank, cluster;
  u64 cell, count;
} hazard;

enum { FLAG_RACE = 1, FLAG_PROXY = 2, FLAG_STRICT = 4, FLAG_BANKS = 8, FLAG_UNINIT_GLOBAL = 16, FLAG_CAREFUL = 32,
       FLAG_SYNC = 64 };
enum { MAX_HAZARDS = 256 };
enum { SCHEDULE_EAGER, SCHEDULE_LATE, SCHEDULE_RANDOM, SCHEDULE_PRIORITY };
enum { NUMERICS_AUTO, NUMERICS_HARDWARE, NUMERICS_FAST };

typedef struct special {
  u32 kind, offset; /* SPECIAL_*, register-file row */
} special;

typedef struct machine {
  const insn *insns;
  const u32 *lists;
  const u32 *refs;
  const u8 *template_file; /* a fresh warp's register file */
  const special *specials;
  const u8 *param;
  u64 *count;              /* executions per instruction */
  u64 *bank_ideal, *bank_passes;
  u64 *lanes;              /* active lanes per instruction */
  u8 *blocked;             /* instruction found its condition not met at least once */
  region *regions;
  hazard *hazards;
  u64 file_bytes, rng;
  i64 instructions, progress;
  i32 n_insns, n_preds, n_slots, n_specials, n_regions, n_hazards;
  i32 cap, last_region, param_bytes, local_bytes;
  u32 flags, spurious;     /* spurious: chance / 2^32 that a blocked try_wait returns false at once */
  u32 grid[3], block[3], cluster_dim[3];
  u32 smem_bytes, static_smem;
  u32 schedule, numerics;  /* SCHEDULE_*, NUMERICS_* */
  u64 seed, matrix_flops, tma_load_bytes;
  const void **maps;       /* decoded tensor maps by parameter offset / 64 */
  struct world *world;     /* what clusters know of each other (global_shadow.c) */
  void **scratch;          /* see scratch() */
  /* event for Python: instruction that needs it */
  i32 ev_pc, ev_frag;
  u32 ev_mask, pad2;
  fault err;
} machine;

typedef void (*lane_fn)(u8 *file, u32 *pred, const insn *i);
typedef int (*system_fn)(machine *M, warp *w, frag *f, const insn *i, u32 mask);

enum { SYS_NEXT, SYS_BLOCK, SYS_ERROR, SYS_PYTHON, SYS_JUMPED };
enum { RUN_BUDGET, RUN_BLOCKED, RUN_EVENT, RUN_EXITED, RUN_ERROR, RUN_SCOREBOARD, RUN_SETTLE };

#define ROW(T, k) ((T *)(file + i->o[k]))
#define WROW(T, off) ((T *)(w->file + (off)))

/* alloc.c: memory that serves one call of the core at a time. It is kept with the machine, because several
 * machines run at once. Each use has a size of its own that never changes. */
enum { SCRATCH_A, SCRATCH_B, SCRATCH_D, SCRATCH_TOTAL, SCRATCH_EXPONENTS, SCRATCH_BOX, SCRATCH_STAMP, SCRATCHES };
void *scratch(machine *M, int use, size_t bytes);

int fail(machine *M, warp *w, const insn *i, int code, int lane, u64 address, u64 extra);

/* sync.c */
void mbar_complete(machine *M, cta *c, mbarrier *b);
mbarrier *mbar_find(machine *M, warp *w, const insn *i, u32 address, cta **owner);
void barrier_settle(machine *M, cta *c, named_barrier *b);
void cluster_settle(machine *M, cluster *k);

/* shadow.c */
enum {
  TOUCH_WRITE = 1,
  TOUCH_CHECK = 2, /* compare with the last write, leave no trace */
  TOUCH_ASYNC = 4,
  TOUCH_LANE = 8,  /* tensor memory: an operation of one thread, not of a warp */
  TOUCH_STRONG = 16 /* atomic, or a volatile, relaxed, acquire or release access: no race with another one */
};
/* Parts of a vector clock, of cap entries each: what has happened before; what of it a fence.proxy.async covers; what
 * of it tcgen05.fence::before_thread_sync covers. Barriers hand on these three. A warp also keeps the operations on
 * tensor memory that are ordered before its own later ones. The whole warp issues some of them, and one lane the
 * others. */
enum { CLOCK_KNOWN, CLOCK_PROXY, CLOCK_SENT, SHARED_PARTS, CLOCK_WARP = SHARED_PARTS, CLOCK_LANE, WARP_PARTS };
void clock_join(i32 *into, const i32 *from, int n);
void clock_release(machine *M, warp *w, i32 *into);
void clock_release_lanes(machine *M, warp *w, i32 *into, u32 lanes);
void clock_tick(warp *w);
void clock_sync_lanes(machine *M, warp *w);
void clock_acquire(machine *M, warp *w, const i32 *from);
void clock_release_relaxed(machine *M, warp *w, i32 *into);
void clock_acquire_relaxed(machine *M, warp *w, const i32 *from);
void clock_fence(machine *M, warp *w, u32 lanes, u32 order);
void tensor_fence_before(machine *M, warp *w);
void tensor_fence_after(machine *M, warp *w);
enum { LANE_COLLECTIVE = 32 };
u32 strong_touch(const insn *i);
void shadow_lanes(machine *M, warp *w, cta *c, u32 offset, u32 n, u32 touch, int lane, const insn *i);
hazard *hazard_report(machine *M, hazard h);

/* exit.c */
void incoming(machine *M, warp *w, cta *c, i32 agent, i32 clock, i32 pc);
void exit_check(machine *M, cta *c);

/* wgmma.c */
void wgmma_free(cta *c);
int wgmma_settle(machine *M, warp *w, frag *f);

/* memory.c */
region *region_find(machine *M, u64 lo, u64 hi);
cta *shared_cta(machine *M, warp *w, const insn *i, u32 address, int lane);

/* global_shadow.c */
void world_new(machine *M, i32 n_clusters);
void world_free(machine *M);
void horizon_free(machine *M, warp *w);
void global_touch(machine *M, warp *w, region *r, u64 address, u32 n, int write, int lane, const insn *i);
void global_order(machine *M, warp *w, u64 address, int lane, const insn *i);
void shared_order(machine *M, warp *w, const cta *c, u32 offset, int lane, const insn *i);
void horizon_sync(machine *M, warp *w);
void horizon_publish(machine *M, warp *w, u32 *barrier, u32 lanes);
void horizon_adopt(machine *M, warp *w, u32 barrier);

/* entry points that other files of the core use too */
void core_clock_cut(const machine *M, const warp *w, u32 lanes, i32 *vc);
int core_bulk_read(machine *M, warp *w, i32 pc, u64 address, u8 *out, i64 n, const i32 *vc, i32 agent, i32 clock);
int core_complete_tx(machine *M, warp *w, i32 pc, u32 address, i64 bytes);
void core_global_touch(machine *M, warp *w, u64 address, u32 n, int write, i32 pc, i32 agent, i32 clock, const i32 *vc);
void core_shadow_bytes(machine *M, cta *c, u32 offset, u32 n, u32 touch, i32 agent, i32 clock, const i32 *vc, i32 pc);

/* These lanes access memory. */
static inline void lanes_access(warp *w, u32 m) {
  int together = (m & (m - 1)) != 0;
  w->actor = together ? w->agent : w->solo;
  *(together ? &w->accessors : &w->solo_lanes) |= m;
}

/* An address in an instruction's operand list. */
typedef struct address_operand {
  u32 row, offset, wide;
} address_operand;
static inline u64 operand_address(warp *w, const address_operand *a, int lane) {
  return (a->wide ? WROW(u64, a->row)[lane] : WROW(u32, a->row)[lane]) + (u64)(i64)(i32)a->offset;
}

static inline i32 *clock_part(const machine *M, i32 *vc, int part) { return vc + (size_t)part * (size_t)M->cap; }

static inline int first_lane(u32 m) { return __builtin_ctz(m); }

#endif
