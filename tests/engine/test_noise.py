"""The noise that a run measures is that of its own samples' gradients, under every layout that can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.assembly.run import Run, open_run
from shoal.comm.collective import Alone
from shoal.data.sample import Batch
from shoal.engine.measure import layer_of
from shoal.engine.tally import Moments, NoiseMeter, NoiseReading, Tally, moments
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of

SUM_ORDER = 1e-9  # float64: two orders of summation, and a difference of nearly equal norms
UNTIED = {**GPT, "tied": False}
ALONE = {"run": {"processes": 1}}
EVERY_STEP = {"noise_every_steps": 1}
CASES = [
    (1, {"batch": {"micro_samples": 2}}),
    (2, {}),
    (2, {"batch": {"micro_samples": 2}}),
    (3, {}),  # uneven shares
    (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    (2, {"layout": {"shard": 2}, "memory": {"zero": 2}, "batch": {"micro_samples": 2}}),
    (4, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    (4, {"layout": {"tensor": 2}}),
    (4, {"layout": {"pipeline": 2}, "model": UNTIED, "batch": {"micro_samples": 2}}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("noise")
    corpus(folder)
    return folder


def _opened(place: TestPlace, folder: str, tables: dict[str, Any]) -> Run:
    with_noise = {"observe": EVERY_STEP, "precision": {"kind": "float64"}, **tables}
    run_file = run_file_of(Path(folder), **with_noise)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    check_across(run_file, file="noise.toml")
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    return open_run(run_file, here, store=place.store)


def measured(place: TestPlace, folder: str, tables: dict[str, Any]) -> tuple[float, float]:
    """(signal, trace) of the first step."""
    run = _opened(place, folder, tables)
    with run.feed() as feed:
        result = run.step(1, feed.next().microbatches, lr=0.0)
    assert result.noise is not None
    assert set(result.noise.values()) == {"noise/scale", "noise/signal", "noise/trace"}
    return result.noise.step.signal, result.noise.step.trace


def expected(place: TestPlace, folder: str, tables: dict[str, Any], shares: int, whole: bool) -> dict[str, Moments]:
    """The same of each layer from gradients of each share's part by itself, in one process that holds the unsplit
    model.
    """
    model = {"model": tables["model"]} if "model" in tables else {}
    run = _opened(place, folder, {**model, "batch": {"micro_samples": 2, **tables.get("batch", {})}})
    run.generation.gradients.close()  # the oracle takes gradients by itself
    parts, batches = [], []
    for share in range(shares):
        micro = tables.get("batch", {}).get("micro_samples")
        own = _samples(run, share, shares)
        batches += own
        parts.append(own if whole or micro is None else own[:micro])
    small, big = [_squares(run, part) for part in parts], _squares(run, batches)
    inverse, share = sum(1 / len(part) for part in parts) / shares, 1 / len(batches)
    return {
        layer: moments(sum(part[layer] for part in small) / shares, square, small_inverse=inverse, big_inverse=share)
        for layer, square in big.items()
    }


def _samples(run: Run, share: int, shares: int) -> list[Batch]:
    """One batch a sample."""
    with run.feed(share=(share, shares)) as feed:
        fed = feed.next().microbatches
    return [_sample(batch, row) for batch in fed for row in range(len(batch))]


def _sample(batch: Batch, row: int) -> Batch:
    keep = slice(row, row + 1)
    assert isinstance(batch.inputs, torch.Tensor)
    assert isinstance(batch.targets, torch.Tensor)
    return Batch(batch.inputs[keep], batch.targets[keep], weights=batch.weights[keep], positions=batch.positions[keep])


def _squares(run: Run, samples: list[Batch]) -> dict[str, float]:
    """|G|^2 of the mean loss over `samples`, by layer."""
    run.model.zero_grad(set_to_none=True)
    weight = sum(sample.weight for sample in samples)
    for sample in samples:
        compute = run.generation.forward_backward.compute
        _, losses = compute.losses(compute.prepared(sample).batch)
        ((losses * sample.weights).sum() / weight).backward()
    found: dict[str, float] = {}
    for name, p in run.model.named_parameters():
        if p.grad is not None:
            found[layer_of(name)] = found.get(layer_of(name), 0.0) + float(p.grad.double().square().sum())
    return found


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("world", "tables"), CASES, ids=lambda case: str(case) if isinstance(case, int) else None)
def test_the_noise_is_that_of_the_samples(ranks, folder: Path, world: int, tables: dict[str, Any]) -> None:
    """Signal and trace are those of each rank's own part, and every rank says the same."""
    layout = tables.get("layout", {})
    shares = world // (layout.get("tensor", 1) * layout.get("pipeline", 1))
    found = ranks(world, measured, str(folder), tables)
    assert len(set(found)) == 1
    layers, *_ = ranks(1, expected, str(folder), tables, shares, "pipeline" in layout)
    wanted = sum(own.signal for own in layers.values()), sum(own.trace for own in layers.values())
    assert found[0] == pytest.approx(wanted, rel=SUM_ORDER)


def measured_by_layer(place: TestPlace, folder: str, tables: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """The trace of the first step, and those of the layers."""
    by_layer = {"observe": EVERY_STEP | {"noise_by_layer": True}}
    run = _opened(place, folder, tables | by_layer)
    with run.feed() as feed:
        result = run.step(1, feed.next().microbatches, lr=0.0)
    assert result.noise is not None
    assert {name for name in result.noise.values() if name.startswith("noise/scale/")} == {
        f"noise/scale/{layer}" for layer in result.noise.layers
    }
    return result.noise.step.trace, {layer: own.trace for layer, own in result.noise.layers.items()}


@pytest.mark.parametrize(("world", "tables"), [CASES[1], CASES[5], CASES[7], CASES[8]], ids=str)
def test_layers_have_noise_of_their_own(ranks, folder: Path, world: int, tables: dict[str, Any]) -> None:
    """That of one process; together they are that of the whole."""
    layout = tables.get("layout", {})
    shares = world // (layout.get("tensor", 1) * layout.get("pipeline", 1))
    found = ranks(world, measured_by_layer, str(folder), tables)
    assert all(each == found[0] for each in found)
    whole, layers = found[0]
    assert {"blocks.0", "blocks.1"} < layers.keys()
    assert sum(layers.values()) == pytest.approx(whole, rel=SUM_ORDER)
    wanted, *_ = ranks(1, expected, str(folder), tables, shares, "pipeline" in layout)
    assert layers == pytest.approx({layer: own.trace for layer, own in wanted.items()}, abs=SUM_ORDER * abs(whole))


@pytest.mark.parametrize(
    ("tables", "word"),
    [
        ({"layout": {"context": 2}}, "layout.context = 2"),
        ({"layout": {"tensor": 2, "sequence_parallel": True}, "run": {"processes": 4}}, "sequence_parallel"),
        ({"layout": {"pipeline": 2}, "model": {**GPT, "tied": True}}, "model.tied"),
        ({"run": {"processes": 1}}, "set batch.micro_samples to 4"),
        ({"layout": {"pipeline": 2, "replicate": 1}, "model": UNTIED}, "two shares"),
        ({**ALONE, "batch": {"micro_samples": 4, "adaptive": {"first": 4}}}, "a step of 4 .*micro_samples to 2"),
        ({**ALONE, "batch": {"micro_samples": 2, "schedule": [{"samples": 2, "until": 8}]}}, "micro_samples to 1"),
        ({**ALONE, "batch": {"micro_samples": 1, "adaptive": {"first": 1}}}, "give every step two samples"),
    ],
)
def test_what_cannot_be_measured_is_refused(tables: dict[str, Any], word: str) -> None:
    """Before any process starts, with the key that stands in the way."""
    run_file: RunFile = run_file_of(Path(), **{"observe": EVERY_STEP, **tables})
    with pytest.raises(ConfigError, match=word):
        check_across(run_file, file="noise.toml")


def test_a_step_of_one_part_has_no_noise() -> None:
    """As the last one of an epoch under `epoch_end = "short"`; nor has one whose samples all have no weight."""

    class Own:
        wanted = True

        def squares(self, places: dict[str, int], device: torch.device) -> torch.Tensor:
            return torch.ones(1, dtype=torch.float64, device=device)

    own: Any = Own()
    meter = NoiseMeter(own, Alone(), every=1, counts=True, separates_microbatches=True, device=torch.device("cpu"))

    def reading(*sizes: int, weight: float = 1.0) -> NoiseReading | None:
        batches = [Batch(torch.zeros(n), torch.zeros(n), torch.full((n,), weight), torch.arange(n)) for n in sizes]
        samples = sum(sizes)
        return meter.reading(batches, Tally(max(1.0, weight * samples), samples, 0, False), norm=0.5, scale=1.0)

    assert reading(4, 3) is not None
    assert reading(3) is None
    assert reading(4, 4, weight=0.0) is None


def test_the_noise_is_not_measured_unless_due(ranks, folder: Path) -> None:
    """Every second step: the first has none."""
    with pytest.raises(AssertionError, match=r"result\.noise"):
        ranks(1, measured, str(folder), {"observe": {"noise_every_steps": 2}, "batch": {"micro_samples": 2}})
