"""The gradients of a run whose model has embedding tables: theirs are sparse, and apart from the dense ones."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.assembly.splitting import Divided, trained_in
from shoal.comm.collective import Collective
from shoal.errors import ConfigError
from shoal.gradients.gradients import Gradients, Groups, VisibleGradients
from shoal.gradients.partition import GradientRanks
from shoal.gradients.sparse_rows import WithSparseRows
from shoal.runfile.run_file import RunFile
from shoal.state.ownership import Trained


def dense_and_tables(run_file: RunFile, parts: Divided) -> tuple[list[Trained], list[Trained]]:
    """The trained parameters with dense gradients, and the tables.

    Raises `ConfigError` for keys that know dense gradients alone.
    """
    trained, roles = trained_in(parts), parts.split.roles
    tables = [t for t in trained if roles[t.holding.name].kind == "table"]
    if tables:
        _check_tables(run_file, tables[0].holding.name)
    return [t for t in trained if roles[t.holding.name].kind != "table"], tables


def with_tables(
    dense: Gradients,
    tables: Sequence[Trained],
    parts: Divided,
    *,
    groups: Groups,
    replica: Collective,
    ranks: GradientRanks,
) -> Gradients:
    """`dense`, and the gradients of `tables` beside it, where there are any: summed over `ranks`. Their norm adds up
    over `replica`.
    """
    if not tables:
        return dense
    assert isinstance(dense, VisibleGradients), "tables with a schedule by priority are refused"
    order = [trained.holding.name for trained in trained_in(parts)]
    return WithSparseRows(
        dense, tables, order=order, across=[groups(ranks(t.holding)) for t in tables], replica=replica
    )


def _check_tables(run_file: RunFile, name: str) -> None:
    """Raises `ConfigError` for keys that know dense gradients alone."""
    found = None
    if not run_file.sync.takes_sparse:
        found = f'sync.kind = "{run_file.sync.variant}"', '"allreduce", "server" or "hogwild"'
    elif run_file.gradients.schedule == "priority":
        found = 'gradients.schedule = "priority"', '"order"'
    elif run_file.observe.noise_every_steps:
        found = f"observe.noise_every_steps = {run_file.observe.noise_every_steps}", "0"
    if found is not None:
        raise ConfigError(
            f"{name} is the weight of an EmbeddingTable, whose gradient is sparse, and {found[0]} needs dense ones; "
            f"set it to {found[1]}, or use nn.Embedding"
        )
