"""Named barriers of a CTA. Barrier 0 belongs to ``cute.arch.sync_threads``."""

import enum


class NamedBarrier(enum.IntEnum):
    """Barriers of kernels whose consumers are warpgroups or warps with S, P and O in registers."""

    PING_PONG = 1  # 1 to 3, by consumer warpgroup: its turn at the tensor cores
    WARPGROUP = 4  # 4 to 6, by consumer warpgroup: its four warps meet
    COMBINE = 7  # warpgroups that combine partials
    ALL_CONSUMERS = 8  # all consumer warps, whose products are in tensor memory
    DEQUANT = 11  # the warpgroup that dequantizes in place, also of kernels with barriers of ``SoftmaxBarrier``


class SoftmaxBarrier(enum.IntEnum):
    """Barriers of kernels whose S and O are in tensor memory."""

    TILE = 1  # 1 and 2, by query tile: whether all of its rows leave a tile of keys out
    ROWS = 3  # 3 to 10, by 32 rows of a query tile: the two warps that share rows exchange values
