/* Creation of clusters, and the layout check that keeps Python's mirror of the structures honest. */
#include <stdlib.h>

#include "lane.h"

EXPORT shadow *core_shadow_new(u32 cells, i32 cap);
EXPORT void core_shadow_free(shadow *s);

enum { S_TID_X, S_TID_Y, S_TID_Z, S_CTAID_X, S_CTAID_Y, S_CTAID_Z, S_NCTAID_X, S_NCTAID_Y, S_NCTAID_Z,
       S_NTID_X, S_NTID_Y, S_NTID_Z, S_CLUSTER_CTAID_X, S_CLUSTER_CTAID_Y, S_CLUSTER_CTAID_Z,
       S_CLUSTER_NCTAID_X, S_CLUSTER_NCTAID_Y, S_CLUSTER_NCTAID_Z,
       S_CLUSTERID_X, S_CLUSTERID_Y, S_CLUSTERID_Z, S_NCLUSTERID_X, S_NCLUSTERID_Y, S_NCLUSTERID_Z,
       S_CLUSTER_CTARANK, S_CLUSTER_NCTARANK, S_LANEID, S_WARPID, S_NWARPID, S_SMID, S_NSMID, S_LANEMASK_EQ,
       S_LANEMASK_LT, S_LANEMASK_LE, S_LANEMASK_GT, S_LANEMASK_GE, S_DYNAMIC_SMEM, S_TOTAL_SMEM, S_SHARED_ADDRESS,
       S_SHARED_ADDRESS64, S_GRIDID };

static u32 special_value(const machine *M, const cta *c, const warp *w, const special *s, int l) {
  const u32 *b = M->block, *g = M->grid, *k = M->cluster_dim;
  u32 lin = (u32)w->id * LANES + (u32)l, one = 1u << l;
  switch (s->kind) {
    case S_TID_X: return lin % b[0];
    case S_TID_Y: return lin / b[0] % b[1];
    case S_TID_Z: return lin / (b[0] * b[1]);
    case S_CTAID_X: case S_CTAID_Y: case S_CTAID_Z: return c->id[s->kind - S_CTAID_X];
    case S_NCTAID_X: case S_NCTAID_Y: case S_NCTAID_Z: return g[s->kind - S_NCTAID_X];
    case S_NTID_X: case S_NTID_Y: case S_NTID_Z: return b[s->kind - S_NTID_X];
    case S_CLUSTER_CTAID_X: case S_CLUSTER_CTAID_Y: case S_CLUSTER_CTAID_Z:
      return c->id[s->kind - S_CLUSTER_CTAID_X] % k[s->kind - S_CLUSTER_CTAID_X];
    case S_CLUSTER_NCTAID_X: case S_CLUSTER_NCTAID_Y: case S_CLUSTER_NCTAID_Z: return k[s->kind - S_CLUSTER_NCTAID_X];
    case S_CLUSTERID_X: case S_CLUSTERID_Y: case S_CLUSTERID_Z:
      return c->id[s->kind - S_CLUSTERID_X] / k[s->kind - S_CLUSTERID_X];
    case S_NCLUSTERID_X: case S_NCLUSTERID_Y: case S_NCLUSTERID_Z:
      return g[s->kind - S_NCLUSTERID_X] / k[s->kind - S_NCLUSTERID_X];
    case S_CLUSTER_CTARANK: return c->rank;
    case S_CLUSTER_NCTARANK: return c->cluster->n_ctas;
    case S_LANEID: return (u32)l;
    case S_WARPID: return (u32)w->id;
    case S_NWARPID: return 64;
    case S_SMID: return (u32)c->cluster->index % 132;
    case S_NSMID: return 132;
    case S_LANEMASK_EQ: return one;
    case S_LANEMASK_LT: return one - 1;
    case S_LANEMASK_LE: return one | (one - 1);
    case S_LANEMASK_GT: return ~(one | (one - 1));
    case S_LANEMASK_GE: return ~(one - 1);
    case S_DYNAMIC_SMEM: return M->smem_bytes;
    case S_TOTAL_SMEM: return M->smem_bytes + M->static_smem;
    default: return 0;
  }
}

static void *take(size_t n, size_t size) { return calloc(n ? n : 1, size); }

/* Structures of a machine besides the ones that Python makes. */
EXPORT void core_machine_open(machine *M, i32 n_clusters) {
  M->scratch = take(SCRATCHES, sizeof *M->scratch);
  world_new(M, n_clusters);
}
EXPORT void core_machine_close(machine *M) {
  world_free(M);
  for (int k = 0; k < SCRATCHES; k++) free(M->scratch[k]);
  free(M->scratch);
  M->scratch = NULL;
}

void *scratch(machine *M, int use, size_t bytes) {
  if (!M->scratch[use]) M->scratch[use] = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  return M->scratch[use];
}

static void warp_init(machine *M, cta *c, warp *w, int id, int threads) {
  w->cta = c;
  w->id = id;
  w->threads = threads < LANES ? threads : LANES;
  w->live = w->threads == LANES ? FULL : (1u << w->threads) - 1;
  w->file = aligned_alloc(64, (M->file_bytes + 63) & ~63ull);
  memcpy(w->file, M->template_file, M->file_bytes);
  w->pred = take((size_t)M->n_preds, sizeof(u32));
  w->written = take((size_t)M->n_slots, sizeof(u32));
  w->busy = take((size_t)M->n_slots, 1);
  w->touched = take((size_t)M->n_slots, 1);
  w->origin = take((size_t)M->n_slots, sizeof(u32));
  w->local = M->local_bytes ? take((size_t)M->local_bytes * LANES, 1) : NULL;
  w->n_frags = 1;
  w->frags[0].mask = w->live;
  for (int k = 0; k < M->n_specials; k++) {
    const special *s = &M->specials[k];
    u8 *row = w->file + s->offset;
    for (int l = 0; l < LANES; l++) {
      if (s->kind == S_SHARED_ADDRESS) ((u32 *)row)[l] += c->rank << RANK_SHIFT;
      else if (s->kind == S_SHARED_ADDRESS64) ((u64 *)row)[l] += (u64)c->rank << RANK_SHIFT;
      else ((u32 *)row)[l] = special_value(M, c, w, s, l);
    }
  }
  if (M->cap) {
    w->agent = c->cluster->n_agents++;
    w->actor = w->agent;
    w->solo = c->cluster->n_agents++;
    w->vc = take(WARP_PARTS * (size_t)M->cap, sizeof(i32));
    w->vc[w->agent] = w->vc[w->solo] = 1;
  }
}

EXPORT cluster *core_cluster_new(machine *M, u32 x, u32 y, u32 z, i32 index) {
  cluster *k = take(1, sizeof *k);
  const u32 *d = M->cluster_dim;
  u32 threads = M->block[0] * M->block[1] * M->block[2];
  k->n_ctas = d[0] * d[1] * d[2];
  k->index = index;
  k->origin[0] = x, k->origin[1] = y, k->origin[2] = z;
  k->n_agents = 1; /* agent 0 stays unused, so that 0 can mean none */
  if (M->cap) k->vc = take(2 * SHARED_PARTS * (size_t)M->cap, sizeof(i32));
  for (u32 r = 0; r < k->n_ctas; r++) {
    cta *c = k->ctas[r] = take(1, sizeof *c);
    c->cluster = k;
    c->rank = r;
    c->id[0] = x + r % d[0], c->id[1] = y + r / d[0] % d[1], c->id[2] = z + r / (d[0] * d[1]);
    c->smem_size = (SMEM_BASE + M->static_smem + M->smem_bytes + 15) & ~15u;
    c->smem = aligned_alloc(1024, (c->smem_size + 2047) & ~1023u);
    memset(c->smem, 0xff, (c->smem_size + 2047) & ~1023u); /* NaN in most formats, -1 in the others */
    c->mbar_slot = take(c->smem_size / 8 + 4, sizeof(u16));
    c->mbars = take(MAX_MBARRIERS, sizeof(mbarrier));
    if (M->flags & FLAG_STRICT) c->init = take(c->smem_size + 16, 1);
    c->n_warps = c->live_warps = (i32)((threads + LANES - 1) / LANES);
    c->warps = take((size_t)c->n_warps, sizeof(warp));
    for (int j = 0; j < c->n_warps; j++) warp_init(M, c, &c->warps[j], j, (int)threads - j * LANES);
    if (M->cap) {
      c->shadow = core_shadow_new(c->smem_size / 4 + 4, M->cap);
      for (int j = 0; j < 16; j++) c->bars[j].vc = take(2 * SHARED_PARTS * (size_t)M->cap, sizeof(i32));
    }
    k->n_warps += c->n_warps;
  }
  k->live_warps = k->n_warps;
  return k;
}

EXPORT void core_cluster_free(machine *M, cluster *k) {
  for (u32 r = 0; r < k->n_ctas; r++) {
    cta *c = k->ctas[r];
    for (int j = 0; j < c->n_warps; j++) {
      warp *w = &c->warps[j];
      horizon_free(M, w);
      free(w->file), free(w->pred), free(w->written), free(w->busy), free(w->touched), free(w->origin);
      free(w->local), free(w->vc), free(w->fenced), free(w->unfenced);
    }
    for (int j = 0; j < c->n_mbars; j++) free(c->mbars[j].vc);
    for (int j = 0; j < 16; j++) free(c->bars[j].vc);
    wgmma_free(c);
    core_shadow_free(c->shadow);
    core_shadow_free(c->tmem_shadow);
    free(c->incoming), free(c->smem), free(c->mbar_slot), free(c->mbars), free(c->init), free(c->warps), free(c);
  }
  free(k->vc), free(k);
}

EXPORT void core_tmem_shadow(machine *M, cta *c) {
  if (!c->tmem_shadow) c->tmem_shadow = core_shadow_new(8 * 512, M->cap);
}
EXPORT i32 core_new_agent(machine *M, cluster *k) { return k->n_agents < M->cap ? k->n_agents++ : -1; }

/* Sizes and offsets that layout.py compares with its own. */
EXPORT const u32 *core_layout(void) {
  static const u32 table[] = {
      sizeof(insn), offsetof(insn, imm), offsetof(insn, list), offsetof(insn, target), offsetof(insn, space),
      sizeof(frag), offsetof(frag, word), offsetof(frag, info),
      sizeof(warp), offsetof(warp, vc), offsetof(warp, id), offsetof(warp, frags),
      sizeof(mbarrier), offsetof(mbarrier, vc), offsetof(mbarrier, seen_phase),
      sizeof(named_barrier), sizeof(cta), offsetof(cta, smem_size), offsetof(cta, bars),
      sizeof(cluster), offsetof(cluster, n_ctas), offsetof(cluster, n_agents),
      sizeof(region), sizeof(fault), sizeof(hazard), sizeof(machine), offsetof(machine, flags),
      offsetof(machine, err), 0};
  return table;
}
