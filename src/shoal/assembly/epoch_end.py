"""The end of an epoch whose samples fill no whole step: `batch.epoch_end`.

With n samples and steps of B, an epoch has n // B whole steps and n % B samples beside them. Positions count what is
used: n an epoch, or under "drop" the n - n % B of whole steps (`data.order.WholeSteps`).
"""

from __future__ import annotations

from shoal.data.batches import OrderOfSamples
from shoal.data.config import BatchConfig
from shoal.data.dataset import Dataset
from shoal.data.drawn import DrawnOrder
from shoal.data.lengths import LengthOrder
from shoal.data.order import Order, WholeSteps
from shoal.data.strata import StratifiedOrder
from shoal.errors import ConfigError
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.topology.layout import Layout


def order_of(run_file: RunFile, data: Dataset) -> OrderOfSamples:
    """Which sample of `data` stands at which position of this run."""
    config = run_file.data
    order = data.order(
        run_file.run.seed,
        shuffle=config.shuffle,
        step=run_file.batch.global_samples,
        straddle=run_file.batch.epoch_end == "straddle",
        window=config.shuffle_window,
    )
    kept = epoch_samples(run_file.batch, order.samples)
    return (
        WholeSteps(order, kept)
        if isinstance(order, Order | StratifiedOrder | DrawnOrder | LengthOrder) and kept != order.samples
        else order
    )


def chosen_samples(run_file: RunFile, data: Dataset) -> dict[str, str]:
    """What decides which samples are used in which order, beside seed and shuffling: a run keeps it."""
    found: dict[str, str] = {} if run_file.data.stratify is None else {"data.stratify": run_file.data.stratify}
    if data.drawn is not None:
        found["the weights of the samples"] = data.drawn.digest
    if data.subset is not None:
        found["data.subset"] = data.subset.digest
    order = order_of(run_file, data) if data.lengths is not None else None
    inner = order.order if isinstance(order, WholeSteps) else order
    if isinstance(inner, LengthOrder):
        found["the lengths, or the samples of a step by length,"] = inner.digest
    return found


def epoch_samples(batch: BatchConfig, samples: int) -> int:
    """Positions of one epoch over `samples` samples. Raises `ConfigError` where dropping leaves none."""
    size = batch.global_samples
    if batch.epoch_end != "drop":
        return samples
    if samples < size:
        raise ConfigError(
            f'batch.epoch_end = "drop" with {samples} samples for steps of {size}: no step would be left; lower '
            'batch.global_samples, or set epoch_end to "short"'
        )
    return samples - samples % size


def epoch_steps(batch: BatchConfig, samples: int, epochs: int) -> int:
    """Steps in so many `epochs` over `samples` samples."""
    positions, size = epoch_samples(batch, samples), batch.global_samples
    return epochs * -(-positions // size) if batch.epoch_end == "short" else batch.steps_to(epochs * positions)


def short_epoch(batch: BatchConfig, samples: int) -> int | None:
    """The epoch that no step goes beyond; None: steps go on into the next one."""
    return samples if batch.epoch_end == "short" else None


def check_short_step(run_file: RunFile, samples: int, layout: Layout) -> None:
    """Raises `ConfigError` where the short step at the end of an epoch cannot be computed as the others are."""
    last = samples % run_file.batch.global_samples
    if run_file.batch.epoch_end != "short" or not last:
        return
    group, shares = statistics_group(run_file.model), layout.replicate * layout.shard - run_file.sync.serving_only
    refusal = None
    if last % group:
        refusal = f"they are no whole groups of {group} (model.group_samples)"
    elif group > 1 and (layout.replica_size > 1 or last < group * shares):
        refusal = f"groups of {group} (model.group_samples) leave some of {shares} ranks without samples"
    elif last < shares and run_file.sync.replicas_are != "lockstep":
        refusal = f"{shares} replicas update by themselves, and some would have no samples"
    if refusal is not None:
        raise ConfigError(
            f'batch.epoch_end = "short": the last step of an epoch has {last} samples, and {refusal}; set it to '
            '"drop" or "straddle"'
        )
