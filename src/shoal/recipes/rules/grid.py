"""What `layout.tensor_grid` asks of the model and of the batch: every column of the grid has whole heads of each kind,
every row as many tokens as another, and every panel of a matrix is as wide as another (`shoal.parallel.tensor.summa`).
"""

from __future__ import annotations

from math import lcm

from shoal.models.config import GPTConfig
from shoal.recipes.rules.divisible import not_multiple
from shoal.recipes.run_file import RunFile


def grid_refusal(run_file: RunFile) -> str | None:
    """Why this grid cannot be, as a sentence; None where it can, and without one."""
    layout, model, grid = run_file.layout, run_file.model, run_file.layout.tensor_grid
    if grid is None:
        return None
    rows, columns = grid
    written, panels = f"layout.tensor_grid = [{rows}, {columns}]", lcm(rows, columns)
    if rows * columns != layout.tensor:
        return f"{written} has {rows * columns} places for layout.tensor = {layout.tensor}: make them as many"
    if not isinstance(model, GPTConfig):
        return None
    heads = model.key_value_heads
    if heads % layout.tensor and (heads % columns or rows % (heads // columns)):
        return (
            f"{written} with model.kv_heads = {heads}: they are a multiple of {layout.tensor}, or {columns} (columns) "
            f"times a divisor of {rows} (rows); nearest: {_either(_kv_heads_on(rows, columns, model.heads), heads)}"
        )
    # The width divides already: it is that of heads, of which every rank has as many.
    features = heads * model.width // model.heads
    sides = {"model.feed_forward_width": model.hidden_width, "keys' features": features}
    for name, side in sides.items():
        if side % panels:
            return not_multiple(name, side, panels, f"the {panels} panels of {written}")
    own = run_file.batch.sequence // layout.context
    if own % rows:
        unit = layout.context * rows
        return not_multiple("batch.sequence", run_file.batch.sequence, unit, f"layout.context x rows = {unit}")
    return None


def _kv_heads_on(rows: int, columns: int, heads: int) -> list[int]:
    """The numbers of key and value heads that lie evenly on a grid."""
    size = rows * columns
    fitting = (n for n in range(1, heads + 1) if heads % n == 0)
    return [n for n in fitting if n % size == 0 or (n % columns == 0 and rows % (n // columns) == 0)]


def _either(numbers: list[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - wanted))[:2])))
