"""`EmbeddingTable`: a large table of vectors, looked up by row, of which each step touches few rows.

    y_i = W[id_i],    dL/dW = the rows that were looked up, and nothing of the others

Recommendation models keep most of their parameters in such tables (DLRM, arXiv:1906.00091). The gradient is sparse
(PyTorch's `nn.Embedding(sparse=True)`): its size, the bytes between ranks and the optimizer's work are in proportion to
the rows touched, not to the table. Under `layout.shard` the ranks split the table by rows or by columns; the vectors
then travel, and never the table (`shoal.parallel.tables`).
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserCodeError

SplitAlong = Literal["rows", "columns"]


class Lookup(Protocol):
    """How ids find their vectors, which other ranks may hold."""

    def __call__(self, weight: Tensor, ids: Tensor) -> Tensor:
        """`ids` int64 `[n]` to vectors `[n, width]`; `weight` is the part of the table that this rank holds."""
        ...


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The whole table is here."""
    return F.embedding(ids, weight, sparse=True)


class EmbeddingTable(nn.Module):
    """`rows` vectors of `width` numbers. Under `layout.shard` each rank holds some rows, or some columns of all rows.

    Split by rows a lookup sends each vector once; split by columns it sends the ids to every rank, and the ranks have
    equal work however uneven the ids are. Several features share one table, and one exchange, if their ids are shifted
    by the rows before them. The first values are normal with standard deviation `std`.
    """

    def __init__(self, rows: int, width: int, *, split: SplitAlong = "rows", std: float = 0.01) -> None:
        super().__init__()
        if rows < 1 or width < 1 or split not in ("rows", "columns"):
            raise UserCodeError(
                f"EmbeddingTable({rows}, {width}, split={split!r}): rows and width are at least 1, and split is "
                '"rows" or "columns"'
            )
        self.rows, self.width, self.split_along = rows, width, split
        self.weight = nn.Parameter(torch.randn(rows, width) * std)
        self.lookup: Lookup = look_up

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` int64 `[...]`, from 0 to `rows` - 1, to vectors `[..., width]`. Raises `UserCodeError` for others."""
        if ids.dtype != torch.int64:
            raise UserCodeError(f"EmbeddingTable takes ids of int64, and got {str(ids.dtype).removeprefix('torch.')}")
        flat = ids.reshape(-1)
        if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < self.rows):
            raise UserCodeError(
                f"EmbeddingTable of {self.rows} rows was given ids from {int(flat.min())} to {int(flat.max())}; ids "
                f"must lie between 0 and {self.rows - 1}"
            )
        return self.lookup(self.weight, flat).view(*ids.shape, self.width)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.width}, split={self.split_along!r}"


def tables_in(model: nn.Module) -> dict[str, EmbeddingTable]:
    """The tables of a model, by the first names of their weights. Raises `UserCodeError` for a tied weight."""
    found = {f"{name}.weight".lstrip("."): m for name, m in model.named_modules() if isinstance(m, EmbeddingTable)}
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    for name, table in found.items():
        if uses.count(id(table.weight)) > 1:
            raise UserCodeError(f"{name}, the weight of an EmbeddingTable, is used by another module too; untie them")
    return found
