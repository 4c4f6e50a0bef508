"""Work of a tcgen05 decode kernel for one leaf of keys, read from its machine code, and its step in the model.

A consumer warpgroup does everything of a leaf in sequence. The first warp of the first one also issues the products of
all warpgroups. Over 8-bit and NVFP4 caches, its second warp issues the products of O. The model counts issue slots as
if the second warpgroup issued products, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.decode import NARROW_TYPES
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.common.accumulators import MMA_ROWS
from hopwell.kernels.sm100.decode.config import PAIR, Sm100DecodeConfig
from hopwell.kernels.support import TYPES_16BIT, TYPES_FP8
from hopwell.perf.blackwell_rates import MMA_DEPTH_BYTES, Rates
from hopwell.perf.decode_workloads import Decode
from hopwell.perf.kernel_work import sass_results, skipped
from hopwell.perf.loops import Loop, innermost
from hopwell.perf.sass import Sass, Timing, disassemble, issue_times, sass_loops
from hopwell.perf.steps import LOAD_CHAIN, Busy, Chain, Instructions, Load, Mma, Operation, Step, Traffic

PAGE = 64  # tokens of a page
E4M3_BITS = 8  # of a block scale
HALF_LANES = 2  # an accumulator of 64 rows has half of the lanes of tensor memory


@dataclass(frozen=True)
class Leaf:
    """Machine code of a leaf whose keys are all visible.

    Attributes:
        parts: up to the wait for S, up to the wait for O, up to the node, and the tree of nodes.
        bursts: products of S and of O, of all tiles of the leaf.
        turns: parts of the leaf whose products are issued together: tiles, or pairs of dequantized tiles.
        buffers: of operand A in tensor memory, 0 if it is in shared memory. With one buffer, a pair of tiles is
            dequantized when the products of the pair before it are done.
        leaves_of_node: leaves that are added up before the tree.
        scores_ahead: whether the products of the next leaf's S follow the products of this leaf's O at once. The warps
            have S in registers by then. The first part is then the issue of these products, and the second one begins
            with the wait for S.
        issued_elsewhere: instructions of ``parts`` that a warp does not execute because another warp issues these
            products.
    """

    parts: tuple[Sequence[Sass], ...]
    bursts: tuple[Mma, Mma]
    warpgroups: int
    leaves_of_node: int
    turns: int = 1
    buffers: int = 0
    scores_ahead: bool = False
    issued_elsewhere: int = 0

    def busy(self, rates: Rates) -> Busy:
        """Return the units of the sub-partition whose warps issue most products."""
        *before, tree = self.parts
        code = list(itertools.chain(*before))
        lanes = WARPGROUP * self.warpgroups
        results, of_tree, share = sass_results(code), sass_results(tree), 1 / self.leaves_of_node
        return Instructions(
            {unit: lanes * (results[unit] + share * of_tree[unit]) for unit in {*results, *of_tree}},
            issue=self.warpgroups * (len(code) + share * len(tree)) - self.issued_elsewhere,
        ).busy(rates)

    def latency(self, rates: Rates) -> float:
        """Return the cycles of a leaf for one warpgroup, with all keys and values in shared memory."""
        to_scores, to_output, to_node, tree = (_times(code, rates)[-1] for code in self.parts)
        node = to_node + tree / self.leaves_of_node
        signal = self.bursts[0].latency(rates) - self.bursts[0].count * self.bursts[0].interval
        score, value = (
            self._multiplied(_times(code, rates), code, burst, signal)
            for code, burst in zip(self.parts, self.bursts, strict=False)
        )
        if not self.scores_ahead:
            return max(to_scores, score + signal) + max(to_output, value + signal) + node
        has_output = max(to_output + to_scores, value + signal)
        has_scores = max(to_output + score, value + self.bursts[0].count * self.bursts[0].interval)
        return max(has_output + node, has_scores + signal)

    def _multiplied(self, times: Sequence[float], code: Sequence[Sass], burst: Mma, signal: float) -> float:
        """Return when the products of all tiles are done."""
        issued = [time for time, one in zip(times, code, strict=True) if one.root == "UTCHMMA"]
        turn = burst.count * burst.interval / self.turns
        waits, done = (turn + signal if self.buffers == 1 else 0.0), 0.0
        for i, time in enumerate(issued[:: max(len(issued) // self.turns, 1)]):
            done = max(done, time + i * waits) + turn
        return done


def _times(code: Sequence[Sass], rates: Rates) -> list[float]:
    return issue_times(code, rates.timings, Timing(rates.other_latency))


def leaf(config: Sm100DecodeConfig, code: Sequence[Sass]) -> Leaf:
    """Find the loop over leaves in the machine code of a kernel."""
    loops = sass_loops(code)

    def having(*roots: str) -> list[Loop]:
        return innermost(loops, lambda loop: {*roots} <= {code[i].root for i in loop.path})

    (whole,) = having("UTCHMMA", "LDTM", "MUFU")
    first, second = sorted((one for one in having("UTCHMMA") if one.body < whole.body), key=lambda one: one.header)
    path = [i for i in whole.path if i not in _masks(whole.path, code)]
    # Behind the first exponential are the products of O, and of the next leaf's S.
    scores_ahead = any(code[i].root == "MUFU" for i in path if i < first.header)

    def of(begin: int, end: int) -> list[int]:
        return [i for i in path if begin <= i < end]

    # A loop issues the products of all tiles, or pairs of tiles, even if each warpgroup dequantizes one pair.
    turns = config.products_of_blocks[0]

    def with_products(begin: int, products: Loop, end: int) -> list[int]:
        """Return the path with the products of all tiles."""
        tiles = products.path * turns
        return [*of(begin, products.header), *tiles, *of(products.latch + 1, end)]

    def next_wait(products: Loop) -> int:
        return next(i for i in path if i > products.latch and code[i].root == "SYNCS")

    first_end, second_end = first.latch + 1 if scores_ahead else next_wait(first), next_wait(second)
    issued = with_products(whole.header, first, first_end), with_products(first_end, second, second_end)
    to_scores, to_output = reversed(issued) if scores_ahead else issued
    # Over 16-bit caches, one warp issues S and O. Otherwise each has a warp of its own.
    fewer = min(len(skipped(products.path, code, "UTCHMMA")) for products in (first, second)) * turns
    loaded = max(i for i in path if code[i].root == "LDTM")
    node = next(i for i in path if i > loaded and code[i].root == "BRA")
    tree = _without_stores(of(node, whole.latch + 1), code)
    parts = (to_scores, to_output, of(second_end, node), tree)
    return Leaf(
        tuple([code[i] for i in part] for part in parts),
        bursts(config),
        config.consumer_warpgroups,
        1 << config.accumulated_levels,
        turns,
        config.operand_buffers,
        scores_ahead,
        fewer if config.operand_buffers else 0,
    )


def _masks(path: Sequence[int], code: Sequence[Sass]) -> set[int]:
    """Return the code that masks a leaf: a branch jumps over it before the first exponential."""
    first = next(n for n, i in enumerate(path) if code[i].root == "MUFU")
    return skipped(path[:first], code, "FSEL")


def _without_stores(path: Sequence[int], code: Sequence[Sass]) -> list[int]:
    """Leave out the blocks that store nodes in global memory: few leaves of a long request do."""
    path = list(path)
    while stores := skipped(path, code, "STG"):
        path = [i for i in path if i not in stores]
    return path


def bursts(config: Sm100DecodeConfig) -> tuple[Mma, Mma]:
    """Return the products of S and of O of a leaf."""
    depth, (of_scores, of_output) = MMA_DEPTH_BYTES // config.q_bytes, config.products_of_blocks
    counts = of_scores * config.layout.tile_dims[0] // depth, of_output * config.leaf_tokens // depth
    rows = MMA_ROWS * (PAIR if config.operand_buffers else 1)
    scores, values = (Mma(count, rows, config.rows, config.operand_buffers > 0) for count in counts)
    return scores, values


def compiled_leaves(config: Sm100DecodeConfig, code: Sequence[Sass]) -> Step:
    """Describe a compiled decode kernel by what its code does. The step is a leaf."""
    work, tile, tiles = leaf(config, code), config.tile, config.leaf_tiles
    keys, ctas = config.leaf_tokens, config.ctas_per_sm
    dims = config.head_dim_qk, config.head_dim_v
    bits = config.kv_element.bits + (E4M3_BITS / config.kv_element.block if config.kv_element.block else 0)
    tile_bytes = [LEAF_TILE * dim * bits / 8 for dim in dims]
    loaded = tiles * sum(tile_bytes)
    # While K of a leaf is multiplied, its stages wait for nothing. Dequantized tiles are given back one by one.
    held = 1 if config.operand_buffers else tiles
    memory = Traffic(memory=loaded, in_flight=round(ctas * (tile.kv_stages * sum(tile_bytes) - held * tile_bytes[0])))
    moved: list[Operation] = [
        memory,
        Traffic(shared=loaded + keys * config.rows * config.q_bytes),
        Instructions(loaded=4 * config.rows * (keys + dims[1]) * HALF_LANES),
    ]
    if config.operand_buffers:  # warps read all narrow elements, and store 16 bits of each
        moved += [Traffic(shared=loaded), Instructions(stored=keys * sum(dims) * 2)]
    # A stage is loaded again as soon as its products are done, or its elements are in tensor memory.
    ahead = ctas * tile.kv_stages // tiles
    reloads = (Chain((one, Load()), ahead, LOAD_CHAIN) for one in work.bursts)
    flop = 2 * config.rows * keys * sum(dims)
    return Step(keys, flop, (*work.bursts, work, *moved), (Chain((work,), ctas), *reloads))


def config_of_decode(case: Decode, arch: str) -> Sm100DecodeConfig:
    """Return the tcgen05 kernel of a case with pages. New tokens of a request have no masked keys in all but their last
    leaf.

    Raises:
        ValueError: there is no such kernel.
    """
    rows, narrow = packed_rows(case), NARROW_TYPES.get(case.kv_dtype)
    kv_type = narrow or KvType.WIDE
    # Kernels over NVFP4 caches are not shipped, and differ in nothing else.
    shipped = KvType.E4M3 if narrow else kv_type
    if rows <= max(Sm100DecodeConfig.tiles_with_tree(case.head_dim, kv_type), default=0):
        wanted = ("bf16", case.head_dim, case.v_head_dim, MaskKind.FULL, KvFetch.PAGE_BOXES, PAGE, shipped)
        tile = Sm100DecodeConfig.rows_for(rows, case.head_dim, kv_type)
        for config in kernels_to_ship(arch, (TYPES_16BIT, TYPES_FP8)):
            if isinstance(config, Sm100DecodeConfig) and config.rows == tile:
                has = (config.dtype, config.head_dim_qk, config.head_dim_v, config.mask, config.kv_fetch)
                if (*has, config.box_rows, config.kv_type) == wanted:
                    return replace(config, kv_type=kv_type)
    raise ValueError(f"{case.name}: no tcgen05 decode kernel for {rows} packed rows at head dim {case.head_dim}")


def compiled_decode(case: Decode, arch: str) -> Step:
    """Return the step of the compiled kernel of a case, with the case's rows of its tile."""
    config = config_of_decode(case, arch)
    step = compiled_leaves(config, disassemble(artifact(config).cubin))
    return replace(step, flop=step.flop * packed_rows(case) // config.rows)


def packed_rows(case: Decode) -> int:
    return case.heads // case.kv_heads * case.q_len
