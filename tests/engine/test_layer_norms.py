"""Under every layout the norm of a layer's gradient is that of the unsplit model, and the layers make up the whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.assembly.metering import layer_norms
from shoal.assembly.run import open_run
from shoal.engine.measure import PREFIX, layer_of
from shoal.launcher.environment import Place
from shoal.runfile.observe_rules import layer_norms_refusal
from shoal.runfile.rules import check_across
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, MOE, corpus, run_file_of

SUM_ORDER = 1e-9  # float64: two orders of summation
CASES: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (4, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    (2, {"layout": {"shard": 2}, "memory": {"zero": 2}, "batch": {"micro_samples": 2}}),
    (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    (4, {"layout": {"tensor": 2}}),
    (2, {"layout": {"context": 2}}),
    (2, {"layout": {"pipeline": 2}, "batch": {"micro_samples": 2}, "model": {**GPT, "tied": True}}),
    (2, {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}, "model": MOE}),
    (
        2,
        {
            "gradients": {"schedule": "priority"},
            "optimizer": {"clip_norm": math.inf},
            "wire": {"check_collectives": False},
        },
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    corpus(folder)
    return folder


def measured(place: TestPlace, folder: str, tables: dict[str, Any]) -> tuple[float, dict[str, float], dict[str, float]]:
    """Of the first step: the norm, the figures of the layers, and on one rank the same from the model's gradients."""
    merged = {"precision": {"kind": "float64"}, "observe": {"layer_norms_every_steps": 1}, **tables}
    run_file = run_file_of(Path(folder), **merged)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    check_across(run_file, file="layers.toml")
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_run(run_file, here, store=place.store)
    meter = layer_norms(run)
    assert meter is not None
    measure = meter.due(1)
    assert measure is not None
    squares: dict[str, float] = {}

    def look(norm: float) -> None:
        measure(norm)
        for name, parameter in run.model.named_parameters() if place.size == 1 else ():
            assert parameter.grad is not None
            layer = layer_of(name)
            squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.double().square().sum())

    with run.feed() as feed:
        result = run.step(1, feed.next().microbatches, lr=0.0, on_gradients=look)
    return result.norm, meter.take_figures(), {layer: math.sqrt(square) for layer, square in squares.items()}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(("world", "tables"), CASES, ids=str)
def test_layers_have_the_norms_of_the_unsplit_model(ranks, folder: Path, world: int, tables: dict[str, Any]) -> None:
    """Each layer's figure is the norm of its parameters' gradients in one process; only the first rank has figures."""
    _, alone, wanted = ranks(1, measured, str(folder), {"model": tables["model"]} if "model" in tables else {})[0]
    assert {name.removeprefix(PREFIX) for name in alone} == wanted.keys()
    assert len(wanted) > 3
    found = ranks(world, measured, str(folder), tables)
    for figures in (alone, found[0][1]):
        assert figures == pytest.approx({PREFIX + layer: norm for layer, norm in wanted.items()}, rel=SUM_ORDER)
    assert [figures for _, figures, _ in found[1:]] == [{}] * (world - 1)
    whole, figures, _ = found[0]
    assert math.sqrt(sum(norm**2 for norm in figures.values())) == pytest.approx(whole, rel=SUM_ORDER)


def test_a_loss_scale_is_not_in_the_figures(ranks, folder: Path) -> None:
    """Under float16 gradients are still scaled when they are measured: the layers make up the norm all the same."""
    ((whole, figures, _),) = ranks(1, measured, str(folder), {"precision": {"kind": "float16", "loss_scale": 256.0}})
    assert math.sqrt(sum(norm**2 for norm in figures.values())) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("blocks.3.attention.query.weight", "blocks.3"),
        ("encoder.layer.0.output.dense.bias", "encoder.layer.0"),
        ("head.weight", "head"),
        ("scale", "scale"),
    ],
)
def test_a_layer_is_named_by_its_number_or_its_module(parameter: str, layer: str) -> None:
    assert layer_of(parameter) == layer


def test_pipedream_has_no_gradient_to_measure() -> None:
    """Every microbatch updates there: refused with the keys."""
    tables = {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}, "batch": {"micro_samples": 2}}
    run_file = run_file_of(Path(), **{"observe": {"layer_norms_every_steps": 5}, **tables})
    sentence = layer_norms_refusal(run_file)
    assert sentence is not None
    assert 'pipeline.schedule = "PipeDream"' in sentence
