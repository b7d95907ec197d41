"""The way into regions whose layers lie in blocks on a grid (`shoal.parallel.tensor.summa`), and out of them.

Rank (i, j) of a grid of R x C works on the block of the stream `[batch, seq, width]` with the i-th of R parts of every
sequence and the j-th of C parts of the features. Ranks stand in the grid row by row, so that under sequence parallelism
the slices of a row of the grid are one part of the sequence, and an exchange within the row makes the block.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shoal.errors import LayoutError
from shoal.parallel.tensor.operators import gathered, linear_map
from shoal.parallel.tensor.summa import Grid
from shoal.topology.refusal import nearest_multiples


def enter_block(x: Tensor, grid: Grid) -> Tensor:
    """The whole stream to this rank's block. Raises `LayoutError` where the sequence does not divide."""
    return linear_map(x, partial(_block, grid=grid), adjoint=partial(_joined, grid=grid))


def leave_block(x: Tensor, grid: Grid) -> Tensor:
    """This rank's block to the whole stream."""
    return linear_map(x, partial(_joined, grid=grid), adjoint=partial(_block, grid=grid))


def enter_block_sequence(x: Tensor, grid: Grid) -> Tensor:
    """This rank's slice `[batch, seq / (R C), width]` of the stream to its block."""
    return linear_map(x, partial(_block_of_slices, grid=grid), adjoint=partial(_slice_of_blocks, grid=grid))


def leave_block_sequence(x: Tensor, grid: Grid) -> Tensor:
    """This rank's block to its slice of the stream."""
    return linear_map(x, partial(_slice_of_blocks, grid=grid), adjoint=partial(_block_of_slices, grid=grid))


def _block(x: Tensor, grid: Grid) -> Tensor:
    rows, columns = grid.column.size, grid.row.size
    if x.shape[1] % rows:
        nearest = " or ".join(map(str, nearest_multiples(rows, x.shape[1])))
        raise LayoutError(
            f"a sequence of {x.shape[1]} tokens cannot be split evenly over the {rows} rows of a grid of ranks; "
            f"nearest: {nearest} tokens"
        )
    blocks = x.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    return blocks[:, grid.column.rank, :, grid.row.rank].contiguous()


def _joined(block: Tensor, grid: Grid) -> Tensor:
    part = gathered(block.transpose(1, 2), grid.row).transpose(1, 2)
    return gathered(part, grid.column)


def _block_of_slices(x: Tensor, grid: Grid) -> Tensor:
    """`[batch, seq, width]` of each rank of the row: features go out, tokens come in."""
    sent = x.unflatten(2, (grid.row.size, -1)).movedim(2, 0).contiguous()
    return _exchanged(sent, grid).transpose(0, 1).flatten(1, 2)


def _slice_of_blocks(block: Tensor, grid: Grid) -> Tensor:
    """The inverse: tokens go out, features come in."""
    sent = block.unflatten(1, (grid.row.size, -1)).transpose(0, 1).contiguous()
    return _exchanged(sent, grid).movedim(0, 2).flatten(2, 3)


def _exchanged(sent: Tensor, grid: Grid) -> Tensor:
    received = torch.empty_like(sent)
    grid.row.all_to_all(received, sent).wait()
    return received
