"""Reading some samples of a source as one batch, with errors that say which sample it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.data.collate import collate, collate_stacked
from shoal.data.config import Denominator
from shoal.data.sample import Batch, BatchSource, Sample, Source, parse_sample
from shoal.errors import DataError, UserCodeError


def read_batch(source: Source, ids: np.ndarray, positions: np.ndarray, *, denominator: Denominator) -> Batch:
    """The samples `ids` at `positions` (both int64 [samples]) as a batch.

    Raises:
        DataError, UserCodeError: the source raised (its exception is the cause) or returned what no sample may be; the
            message names the sample id and the position.
    """
    if isinstance(source, BatchSource):
        stacked = _guarded(source.samples_at, ids, where=_where(ids, positions))
        return _guarded(
            lambda rows: collate_stacked(rows, positions, denominator=denominator),
            stacked,
            where=_where(ids, positions),
        )
    samples = [_read_sample(source, int(i), position=int(p)) for i, p in zip(ids, positions, strict=True)]
    return _guarded(
        lambda rows: collate(rows, positions, denominator=denominator), samples, where=_where(ids, positions)
    )


def _read_sample(source: Source, index: int, *, position: int) -> Sample:
    return _guarded(lambda i: parse_sample(source[i]), index, where=f"Sample {index} at position {position}")


def _guarded(function: Any, argument: Any, *, where: str) -> Any:
    """`function(argument)`; what it raises is raised again with `where` in front, and itself as the cause."""
    try:
        return function(argument)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except UserCodeError as error:
        raise UserCodeError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserCodeError(
            f"{where}: the data source raised {type(error).__name__}: {error}. Mend the sample or the code "
            "that reads it."
        ) from error


def _where(ids: np.ndarray, positions: np.ndarray) -> str:
    if len(ids) == 1:
        return f"Sample {int(ids[0])} at position {int(positions[0])}"
    return (
        f"Samples {int(ids[0])} .. {int(ids[-1])} ({len(ids)} of them) at positions {int(positions[0])} .. "
        f"{int(positions[-1])}"
    )
