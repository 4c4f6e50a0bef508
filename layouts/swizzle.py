"""The 128x4 swizzle: the order of block scales for Blackwell's block-scaled matrix units.

A [rows, columns] matrix of block scales is cut into tiles of 128 rows by 4 columns, 512 bytes each. Inside a tile the
four columns of rows r, r + 32, r + 64 and r + 96 are neighbours. NVFP4 outputs of
``trtllm_batch_context_with_kv_cache`` have this order: row = first row + token, column = (head * head_dim + d) // 16.
"""

from __future__ import annotations

from typing import Any

import torch

from hopwell.layouts._checks import SCALE_TYPES, require_dtype, require_multiple, require_rank

_ROWS = 128
_COLUMNS = 4


def swizzled_128x4_shape(rows: int, columns: int) -> tuple[int, int]:
    """Round the shape of a scale matrix up to whole 128x4 tiles.

    >>> swizzled_128x4_shape(100, 30)
    (128, 32)
    """
    return -(-rows // _ROWS) * _ROWS, -(-columns // _COLUMNS) * _COLUMNS


def swizzled_128x4_offset(row: Any, column: Any, columns: int) -> Any:
    """Return the byte offset in a swizzled buffer of the block scale at (``row``, ``column``).

    The function is plain arithmetic: integers, tensors and values of a kernel being traced all work.

    Args:
        row: row in the unswizzled matrix.
        column: column in the unswizzled matrix.
        columns: the buffer's number of columns, a multiple of 4 (padding included).

    Raises:
        ValueError: ``columns`` is not a multiple of 4.

    >>> swizzled_128x4_offset(33, 5, 8)
    533
    """
    require_multiple(columns, _COLUMNS, "columns")
    tile = row // _ROWS * (columns // _COLUMNS) + column // _COLUMNS
    return tile * 512 + row % 32 * 16 + row % _ROWS // 32 * 4 + column % _COLUMNS


def swizzled_128x4_view(swizzled: torch.Tensor, name: str = "swizzled") -> torch.Tensor:
    """View a swizzled buffer in logical order, to read and write block scales in place.

    Args:
        swizzled: contiguous [rows, columns], multiples of 128 and 4; float8_e4m3fn or uint8.
        name: name of ``swizzled`` in messages.

    Returns:
        A view [rows / 128, 4, 32, columns / 4, 4]: (row, column) of the matrix is
        ``view[row // 128, row % 128 // 32, row % 32, column // 4, column % 4]``.

    Raises:
        TypeError: ``swizzled`` is not a tensor, or has another dtype.
        ValueError: the rank is wrong, a tile is incomplete, or the buffer is not contiguous.

    >>> tuple(swizzled_128x4_view(torch.empty(256, 8, dtype=torch.uint8)).shape)
    (2, 4, 32, 2, 4)
    """
    require_rank(swizzled, 2, name, "[rows, columns]")
    require_dtype(swizzled, SCALE_TYPES, name)
    rows, columns = swizzled.shape
    require_multiple(rows, _ROWS, f"{name}'s number of rows")
    require_multiple(columns, _COLUMNS, f"{name}'s number of columns")
    if not swizzled.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {swizzled.stride()}")
    return swizzled.view(rows // _ROWS, columns // _COLUMNS, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Swizzle a matrix of block scales into a new buffer, padded with zeros to whole tiles.

    Args:
        scales: [rows, columns], any strides; float8_e4m3fn or uint8.

    Returns:
        Contiguous [round_up(rows, 128), round_up(columns, 4)] of the same dtype.

    Raises:
        TypeError: ``scales`` is not a tensor, or has another dtype.
        ValueError: it is not 2-D.

    >>> scales = torch.arange(128, dtype=torch.uint8).view(32, 4)
    >>> swizzle_128x4(scales).view(-1)[16:20].tolist()  # row 1
    [4, 5, 6, 7]
    """
    require_rank(scales, 2, "scales", "[rows, columns]")
    require_dtype(scales, SCALE_TYPES, "scales")
    shape = swizzled_128x4_shape(*scales.shape)
    swizzled = torch.zeros(shape, dtype=torch.uint8, device=scales.device).view(scales.dtype)
    store_swizzled_128x4(swizzled, scales)
    return swizzled


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, columns: int, first_row: int = 0) -> torch.Tensor:
    """Read block scales back from a swizzled buffer: the inverse of :func:`swizzle_128x4`.

    Args:
        swizzled: as in :func:`swizzled_128x4_view`.
        rows: height of the matrix to read.
        columns: width of the matrix to read.
        first_row: row of the buffer at which the matrix starts.

    Returns:
        A new contiguous [``rows``, ``columns``] of the same dtype.

    Raises:
        TypeError: ``swizzled`` is not a tensor, or has another dtype.
        ValueError: as :func:`swizzled_128x4_view`, or the matrix does not fit.

    >>> scales = torch.arange(90, dtype=torch.uint8).view(30, 3)
    >>> torch.equal(unswizzle_128x4(swizzle_128x4(scales), 30, 3), scales)
    True
    """
    view = swizzled_128x4_view(swizzled)
    _check_fits(swizzled, rows, columns, first_row)
    matrix = view.view(torch.uint8).reshape(swizzled.shape)[first_row : first_row + rows, :columns]
    return matrix.contiguous().view(swizzled.dtype)


def store_swizzled_128x4(swizzled: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> None:
    """Write block scales into rows of a swizzled buffer and leave every other byte unchanged.

    Several producers can thus share one buffer, the purpose of FlashInfer's ``FP4Tensor.scale_start_index``.

    Args:
        swizzled: as in :func:`swizzled_128x4_view`; written in place.
        scales: [rows, columns] of the same dtype, with at most the columns of ``swizzled``.
        first_row: row of the buffer that receives ``scales[0]``.

    Raises:
        TypeError: an argument is not a tensor, or the dtypes differ.
        ValueError: as :func:`swizzled_128x4_view`, or ``scales`` does not fit.

    >>> buffer = torch.zeros(128, 4, dtype=torch.uint8)
    >>> store_swizzled_128x4(buffer, torch.tensor([[1, 2, 3]], dtype=torch.uint8), first_row=32)
    >>> buffer.view(-1)[:8].tolist()
    [0, 0, 0, 0, 1, 2, 3, 0]
    """
    swizzled_128x4_view(swizzled)
    require_rank(scales, 2, "scales", "[rows, columns]")
    require_dtype(scales, (swizzled.dtype,), "scales")
    rows, columns = scales.shape
    _check_fits(swizzled, rows, columns, first_row)
    row = torch.arange(first_row, first_row + rows, device=swizzled.device)[:, None]
    column = torch.arange(columns, device=swizzled.device)
    offset = swizzled_128x4_offset(row, column, swizzled.shape[1])
    swizzled.view(torch.uint8).view(-1)[offset] = scales.view(torch.uint8)


def _check_fits(swizzled: torch.Tensor, rows: int, columns: int, first_row: int) -> None:
    height, width = swizzled.shape
    if not (first_row >= 0 and rows >= 0 and first_row + rows <= height):
        raise ValueError(f"rows {first_row}..{first_row + rows} must lie in 0..{height}, the buffer's rows")
    if not 0 <= columns <= width:
        raise ValueError(f"columns must be in 0..{width}, the buffer's columns, got {columns}")
