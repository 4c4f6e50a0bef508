"""Dequantization of e4m3 queries for NVFP4 keys and values, which are multiplied as float16. A consumer warpgroup
dequantizes its rows of a Q tile in place, once, before the products.

TMA fills the last column blocks of a stage with e4m3 rows, which have half of the bytes of float16 rows. Each column
block becomes two, one block after the other from the left. The overwritten bytes have been read by then, so a thread
holds only 16 registers of Q at a time.
"""

import cutlass.cute as cute
from cutlass import Float16

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.dequant.eight_bit import dequantized_words
from hopwell.kernels.sm90.common.dequant import BLOCK_VECTORS, DEQUANTIZED_ROWS
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS


def dequantize_queries(kernel, tile, stage, row_block, barrier: int, consumer) -> None:
    """Dequantize the rows of ``row_block`` in a stage of Q. The whole warpgroup ``consumer`` must call this; it meets
    at the named barrier ``barrier`` + ``consumer``."""
    config, rows = kernel.config, kernel.tile.m
    assert config.v_splits == 1, "two warpgroups with halves of the value have the same rows of Q"
    wide, loaded = config.layout.q_columns, config.layout.loaded_q_columns
    target = shared_address(tile.iterator) + stage * (rows * wide * HALFWORD_BYTES)
    source = target + config.layout.first_loaded_q_block * rows * copy.SWIZZLE_ROW_BYTES
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    row, vector = row_block * WARPGROUP_ROWS + thread // BLOCK_VECTORS, thread % BLOCK_VECTORS
    for first in range(0, wide // BLOCK_COLUMNS, 2):
        places = [
            (row + below, block * BLOCK_VECTORS + vector)
            for block in range(first, min(first + 2, wide // BLOCK_COLUMNS))
            for below in range(0, WARPGROUP_ROWS, DEQUANTIZED_ROWS)
        ]
        words = [copy.load_shared(copy.tile_vector(source, *place, rows, loaded, False), 4) for place in places]
        cute.arch.barrier(barrier_id=barrier + consumer, number_of_threads=WARPGROUP)
        for (at, narrow_vector), narrow in zip(places, words, strict=True):
            halves = [half for word in narrow for half in dequantized_words(KvType.E4M3, Float16, word)]
            for i in range(2):
                place = copy.tile_vector(target, at, 2 * narrow_vector + i, rows, wide, False)
                copy.store_shared(place, halves[4 * i : 4 * i + 4])
    # The tensor cores read these writes through another proxy, and TMA overwrites them with the next Q through it.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier + consumer, number_of_threads=WARPGROUP)
