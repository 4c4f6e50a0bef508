/* Messages between CTAs of a cluster: arrivals at mbarriers, accesses to shared memory, products of a pair.
 *
 * PTX ISA, "tcgen05 issue granularity": the peer CTA of a product must not have exited. For "ld", "mbarrier.arrive"
 * and "cp.async.bulk" on shared::cluster memory, the CTA must be running. A CTA knows that something has arrived if
 * one of its warps has learned it through barriers. */
#include <stdlib.h>

#include "core.h"

static void exits_early(machine *M, cta *c, i32 agent, i32 pc) {
  hazard_report(M, (hazard){.kind = HAZARD_EXIT, .pc = pc, .other_pc = -1, .agent = agent, .other_agent = agent,
                            .rank = (i32)c->rank, .cluster = c->cluster->index});
}

/* An operation reaches ``c``; a warp knows that it has arrived at ``clock`` of ``agent``. */
EXPORT void core_arrival(machine *M, cta *c, i32 agent, i32 clock, i32 pc) {
  if (!(M->flags & FLAG_RACE)) return;
  if (c->exited) { exits_early(M, c, agent, pc); return; }
  if (!c->incoming) c->incoming = calloc((size_t)M->cap, sizeof(cell_clock));
  if (clock > c->incoming[agent].clock) c->incoming[agent] = (cell_clock){clock, (u32)pc};
}
/* The same for an operation of ``w``, unless the CTA is its own. */
void incoming(machine *M, warp *w, cta *c, i32 agent, i32 clock, i32 pc) {
  if (c != w->cta) core_arrival(M, c, agent, clock, pc);
}
EXPORT void core_incoming(machine *M, warp *w, cta *c, i32 agent, i32 clock, i32 pc) {
  incoming(M, w, c, agent, clock, pc);
}

/* The last warp of the CTA has exited. */
void exit_check(machine *M, cta *c) {
  if (!c->incoming) return;
  for (i32 agent = 0; agent < M->cap; agent++) {
    cell_clock sent = c->incoming[agent];
    int is_known = !sent.clock;
    for (i32 k = 0; k < c->n_warps && !is_known; k++) is_known = c->warps[k].vc[agent] >= sent.clock;
    if (!is_known) exits_early(M, c, agent, (i32)sent.pc);
  }
}
