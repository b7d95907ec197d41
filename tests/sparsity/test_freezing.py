"""Layers that are not trained: what they keep, send and compute, in every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.assembly.sparse import left_out_in
from shoal.comm.collective import Alone
from shoal.engine.recovery import resume
from shoal.errors import ConfigError
from shoal.memory.tracker import measured_activation_bytes
from shoal.models.config import GPTConfig
from shoal.models.gpt import GPT
from shoal.optim.average import Resting, keep_average
from shoal.optim.declared import EMA, SWA, AverageConfig
from shoal.sparsity.config import FreezeByProgress, FreezeConfig, FreezeLater
from shoal.sparsity.freezing import Freezing, blocks_of, freeze, frozen_by_schedule, matches
from shoal.sparsity.masks import Masks
from shoal.state import Owned, Region, targets_of
from shoal.topology.holding import Box, Holding, Placement
from tests.assembly.journey import Leg, save, travel, whole_state
from tests.ranks import TestPlace
from tests.sync.steps import ADAM, Trained, gap, opened, train
from tests.verification.layouts import corpus, verified

SMALL = {"kind": "gpt", "vocabulary": 61, "layers": 4, "width": 16, "heads": 2, "feed_forward_width": 24}
BASE = ADAM | {"model": SMALL}
HALF = {"freeze": {"layers": ["embedding", "blocks.0", "blocks.1"]}}
WINDOW = {"freeze": {"later": [{"layers": ["embedding", "blocks.0"], "at": 4, "until": 8}]}}
PROGRESS = {"freeze": {"progress": {"every": 1, "below": 0.9, "patience": 1}}}
SUM_ORDER = 1e-8
"""Weights in float64 after 12 steps of AdamW, relative. Moments that begin anew amplify: 1e-9 was seen, else 1e-12."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
}
BY_GRADIENT = {"freeze": {"progress": {"criterion": "gradient", "every": 2, "below": 0.6, "patience": 1}}}
BY_ACTIVATIONS = {
    "freeze": {"progress": {"criterion": "activations", "every": 1, "below": 0.9, "patience": 1, "window": 3}}
}
FROZEN = {"half": HALF, "window": WINDOW, "progress": PROGRESS, "gradient": BY_GRADIENT, "activations": BY_ACTIVATIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    corpus(folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks, folder: Path) -> dict[str, Trained]:
    """Twelve steps of one process."""
    return {kind: ranks(1, train, BASE | tables, str(folder))[0] for kind, tables in FROZEN.items()}


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [kind for kind in FROZEN if kind != "activations"])
def test_every_layout_trains_as_one_process(
    ranks, folder: Path, alone: dict[str, Trained], kind: str, layout: str
) -> None:
    world, tables = LAYOUTS[layout]
    found = ranks(world, train, BASE | FROZEN[kind] | tables, str(folder))[0]
    assert found.state.keys() == alone[kind].state.keys()
    assert gap(found.weights, alone[kind].weights) < SUM_ORDER


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(before[name], tensor)}


def test_what_is_frozen_stays_and_has_no_state(ranks, folder: Path, alone: dict[str, Trained]) -> None:
    frozen = ("embedding", "blocks.0.", "blocks.1.")
    first = ranks(1, train, BASE, str(folder), 0, 0)[0].weights
    after = alone["half"]
    assert moved(first, after.weights) == {n for n in first if not n.removeprefix("model/").startswith(frozen)}
    assert not any(name.split("/", 2)[2].startswith(frozen) for name in after.state if name.startswith("optimizer/"))


@pytest.mark.slow
def test_half_a_model_sends_half_of_its_gradients(ranks, folder: Path) -> None:
    """From the start, and while a schedule freezes it; the masks of neither cost an index on the wire."""
    tables = BASE | LAYOUTS["replicate"][1]
    every = ranks(2, train, tables, str(folder), 0, 6)[0].sent[-1]
    half = ranks(2, train, tables | HALF, str(folder), 0, 6)[0].sent[-1]
    later = {"freeze": {"later": [{"layers": HALF["freeze"]["layers"], "at": 4}]}}
    scheduled = ranks(2, train, tables | later, str(folder), 0, 6)[0].sent
    assert half / every == pytest.approx(0.5, abs=0.05)
    assert scheduled[-1] == pytest.approx(half, rel=0.01)
    assert scheduled[2] == pytest.approx(every, rel=0.01)


def test_frozen_blocks_keep_no_activations() -> None:
    """What is saved is that of a model of the trained blocks alone, to the byte."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)

    def kept(layers: int, frozen: tuple[str, ...]) -> int:
        model = GPT(GPTConfig(vocabulary=61, layers=layers, width=16, heads=2))
        if frozen:
            freeze(model, FreezeConfig(layers=frozen))
        return measured_activation_bytes(lambda: model(tokens))

    two, four = kept(2, ("embedding",)), kept(4, ())
    assert kept(4, ("embedding", "blocks.0", "blocks.1")) == two
    assert two < 0.6 * four


@pytest.mark.slow
def test_a_schedule_freezes_and_thaws(ranks, folder: Path) -> None:
    """Steps 4 to 7 of 12 leave the first block as it is; afterwards its moments begin anew."""
    at = {step: ranks(1, train, BASE | WINDOW, str(folder), 0, step)[0].state for step in (3, 7, 8, 12)}
    own = "blocks.0.attention.query.weight"
    assert torch.equal(at[3][f"model/{own}"], at[7][f"model/{own}"])
    assert not torch.equal(at[7][f"model/{own}"], at[8][f"model/{own}"])
    assert not torch.equal(at[3]["model/head.weight"], at[7]["model/head.weight"])
    assert f"optimizer/exp_avg/{own}" in at[3]
    assert f"optimizer/exp_avg/{own}" not in at[7]
    assert float(at[12][f"optimizer/step/{own}"]) == 5.0
    assert float(at[12]["optimizer/step/head.weight"]) == 12.0


SECOND_ORDER = {
    "optimizer": {"kind": "kfac", "every": 10},
    "freeze": {"later": [{"layers": ["blocks.1"], "at": 4, "until": 6}]},
}
FACTORS = 1e-6
"""Weights in float64 after seven steps of K-FAC, relative: eigenvectors of small eigenvalues amplify last bits."""


@pytest.mark.slow
def test_kfac_measures_a_layer_anew_when_it_thaws(ranks, folder: Path) -> None:
    """Between two steps in which it measures all layers, whoever keeps the decompositions. What comes before the frozen
    block is trained, so that gradients pass through it.
    """
    plain = ranks(1, train, BASE | SECOND_ORDER, str(folder), 0, 7)[0]
    own = "blocks.1.attention.query.weight"
    assert f"optimizer/mean_rows/{own}" in plain.state
    for layout in ("replicate", "ZeRO-1", "ZeRO-3"):
        for decompositions in ("owner", "all"):
            world, tables = LAYOUTS[layout]
            optimizer = {"optimizer": SECOND_ORDER["optimizer"] | {"decompositions": decompositions}}
            found = ranks(world, train, BASE | SECOND_ORDER | tables | optimizer, str(folder), 0, 7)[0]
            assert gap(found.weights, plain.weights) < FACTORS, (layout, decompositions)


CLIPPED = {"optimizer": {"kind": "adamw", "clip_norm": 1e-3}}
NOISY = {"optimizer": {"kind": "adamw", "transforms": [{"kind": "add_noise", "std": 0.01}]}}


@pytest.mark.parametrize(
    ("layout", "tables"),
    [
        pytest.param("ZeRO-1", CLIPPED, id="ZeRO-1, clipped"),
        pytest.param("ZeRO-1", CLIPPED | {"precision": {"kind": "bfloat16"}}, id="ZeRO-1, bfloat16"),
        pytest.param("ZeRO-3", CLIPPED, id="ZeRO-3, clipped", marks=pytest.mark.slow),
        pytest.param("replicate", NOISY, id="replicate, noise"),
    ],
)
def test_what_changes_gradients_gives_none_to_a_frozen_layer(
    ranks, folder: Path, layout: str, tables: dict[str, Any]
) -> None:
    """Not even the decay of its weights."""
    world, own = LAYOUTS[layout]
    moving, state = ranks(world, through_a_window, BASE | WINDOW | own | tables, str(folder))[0]
    assert "head.weight" in moving & state
    assert not [name for name in moving if name.startswith(("embedding", "blocks.0."))]
    assert not [name for name in state if name.startswith(("embedding", "blocks.0."))]


def through_a_window(place: TestPlace, tables: dict[str, Any], folder: str) -> tuple[set[str], set[str]]:
    """What moves in steps 4 to 7 of `WINDOW`, and of what the optimizer has state then."""
    run, at = opened(place, tables, folder, Path(folder) / "unused"), {}
    with closing(run.feed()) as feed:
        for step in range(1, 8):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            run.step(step, fed.microbatches, lr=0.05)
            if step in (3, 7):
                at[step] = {name: tensor.clone() for name, tensor in whole_state(run).items()}
    first, last = ({n.removeprefix("model/"): t for n, t in at[s].items() if n.startswith("model/")} for s in (3, 7))
    return moved(first, last), {name.split("/", 2)[2] for name in at[7] if name.startswith("optimizer/")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("window", ["replicate", "ZeRO-3"]),
        ("progress", ["ZeRO-1", "replicate"]),
        ("gradient", ["tensor", "ZeRO-3"]),
        ("activations", ["replicate", "ZeRO-2"]),
    ],
)
def test_a_run_resumes_while_layers_are_frozen(ranks, kind: str, layouts: list[str], tmp_path: Path) -> None:
    """And averages of their weights."""
    corpus(tmp_path)
    averaged = BASE | {"optimizer": {"average": {"kind": "ema", "decay": 0.5}}} | FROZEN[kind]

    def leg(layout: str, name: str, steps: int) -> Leg:
        world, tables = LAYOUTS[layout]
        return ranks(world, travel, averaged | tables, str(tmp_path), name, steps)[0]

    whole = leg(layouts[0], "whole", 9)
    first, second = leg(layouts[0], "halves", 5), leg(layouts[0], "halves", 4)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.left[name], tensor) for name, tensor in whole.left.items())
    begun, gone_on = leg(layouts[0], "abroad", 5), leg(layouts[1], "abroad", 4)
    assert all(torch.equal(gone_on.came[name], tensor) for name, tensor in begun.left.items())
    assert gone_on.losses == pytest.approx(whole.losses[5:], rel=1e-12)


@pytest.mark.parametrize("kind", ["progress", "gradient", "activations"])
def test_progress_freezes_blocks_from_the_front(alone: dict[str, Trained], kind: str) -> None:
    """The optimizer has no state for the first block, and has it for the last one."""
    states = {name.split("/", 2)[2] for name in alone[kind].state if name.startswith("optimizer/exp_avg/")}
    assert not any(name.startswith(("embedding", "blocks.0.")) for name in states)
    assert any(name.startswith("blocks.3.") for name in states)
    assert "head.weight" in states


DIGITS = {
    "model": {"kind": "convnet", "channels": 1, "classes": 10, "width": 8},
    "data": {"kind": "digits"},
    "batch": {"global_samples": 32},
    "schedule": {"kind": "step", "milestones": [45]},
    "precision": {"kind": "float64"},
}
"""A training of 60 steps, whose rate falls by ten after step 45."""
EASILY = {"every": 2, "below": 0.9, "patience": 1, "window": 3}
"""So that blocks of a training that has hardly begun count as settled."""


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["activations", "movement", "gradient"])
def test_a_training_freezes_and_thaws_alike_in_every_layout_and_through_a_restart(
    ranks, tmp_path: Path, criterion: str
) -> None:
    """A convolutional net learns digits. What is frozen when it stops goes on so, here in every bit."""
    layouts = ["replicate", "ZeRO-1", "ZeRO-2" if criterion == "activations" else "ZeRO-3"]
    tables = DIGITS | {"freeze": {"progress": {"criterion": criterion, **EASILY}}}

    def run(layout: str, name: str, first: int, last: int) -> list[tuple[list[int], dict[str, Tensor]]]:
        world, own = LAYOUTS[layout]
        return ranks(world, decided, tables | own, str(tmp_path), f"{name} {layout}", first, last)

    decisions, whole = run(layouts[0], "whole", 0, 60)[0]
    assert decisions[0] == 0 < decisions[44], "frozen at the end of the high rate"
    assert decisions[45] == 0, "trained again after the first step of the low one"
    for layout in layouts[1:]:
        assert [found for found, _ in run(layout, "whole", 0, 60)] == [decisions] * 2, layout
    stop = 2 + decisions.index(max(decisions))
    half = run(layouts[0], "halves", 0, stop)[0][0]
    rest, state = run(layouts[0], "halves", stop, 60)[0]
    assert half + rest == decisions
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    abroad = run(layouts[0], "abroad", 0, stop)
    (tmp_path / f"abroad {layouts[0]}").rename(tmp_path / f"abroad {layouts[-1]}")
    assert abroad[0][0] + run(layouts[-1], "abroad", stop, 60)[0][0] == decisions


def decided(
    place: TestPlace, tables: dict[str, Any], folder: str, name: str, first: int, last: int
) -> tuple[list[int], dict[str, Tensor]]:
    """How many parameters are frozen after steps `first` + 1 .. `last`, and the whole state then, which is saved."""
    run, found = opened(place, tables, folder, Path(folder) / name, steps=60), []
    if first:
        resume(run.state, Path(folder) / name, announce=run.process.announce, warn=print)
    (freezing,) = left_out_in(run.state)
    assert isinstance(freezing, Freezing)
    with closing(run.feed()) as feed:
        for step in range(first + 1, last + 1):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            run.step(step, fed.microbatches, lr=4e-3 if step <= 45 else 4e-4)
            found.append(len(freezing.frozen(step + 1)))
    save(run, Path(folder) / name, place)
    return found, whole_state(run)


def whole(name: str, values: Tensor) -> Owned:
    """A parameter that this rank has alone."""
    shape = tuple(values.shape)
    box = Box((0, 0), shape)
    holding = Holding(name, shape, (box,), Placement((), (), ()), 0, *[(0,)] * 4)
    return Owned(name, Parameter(values), holding, (Region(box, 0),))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_compared_without_their_scale(scale: float) -> None:
    """A loss scale that changes is no change of a gradient, and what is in no block is not summed."""
    shape = (2, 2)
    names = ["blocks.0.weight", "blocks.1.weight", "head.weight"]
    owned = [whole(name, torch.zeros(shape)) for name in names]
    freezing = Freezing(
        FreezeConfig(progress=FreezeByProgress(criterion="gradient", every=2)),
        {own.name: own.parameter for own in owned},
        owned,
        Resting(torch.optim.SGD([own.parameter for own in owned], lr=0.1), None),
        names=names,
        replica=Alone(),
        masks=Masks(),
        rate=lambda step: 0.1,
    )
    for step, by in ((1, 1.0), (2, scale)):
        for number, own in enumerate(owned):
            own.parameter.grad = torch.full(shape, by * (number + 1))
        freezing.agreed(step, scale=by)
    assert set(freezing.tensors()) == {"freeze/gradient/blocks.0.weight", "freeze/gradient/blocks.1.weight"}
    freezing.updated(2)
    assert freezing.facts()["before"] == [4.0, 8.0], "twice a tensor of four ones, and of four twos"


def test_a_run_that_goes_on_with_another_interval_compares_with_no_reference_of_before() -> None:
    """As with more steps, which the default follows."""

    def freezing(every: int) -> tuple[Freezing, Parameter]:
        owned = [whole(f"blocks.{number}.weight", torch.ones(2, 2)) for number in (0, 1)]
        made = Freezing(
            FreezeConfig(progress=FreezeByProgress(every=every)),
            {own.name: own.parameter for own in owned},
            owned,
            Resting(torch.optim.SGD([own.parameter for own in owned], lr=0.1), None),
            names=[own.name for own in owned],
            replica=Alone(),
            masks=Masks(),
            rate=lambda step: 0.1,
        )
        return made, owned[0].parameter

    def trained(made: Freezing, weight: Parameter, steps: range) -> list[float]:
        for step in steps:
            with torch.no_grad():
                weight.mul_(1 + step / 100)
            made.updated(step)
        return made.facts()["largest"]

    first, weight = freezing(2)
    alone = trained(first, weight, range(1, 9))
    stopped, weight = freezing(2)
    trained(stopped, weight, range(1, 6))
    for every, found in ((2, alone), (3, [0.0, 0.0])):
        after, moved_on = freezing(every)
        with torch.no_grad():
            moved_on.copy_(weight)
        into = after.targets(dict.fromkeys(stopped.tensors(), torch.float32))
        for name, held in stopped.tensors().items():
            for target, source in zip(targets_of(into[name]), targets_of(held), strict=True):
                target.tensor.copy_(source.tensor)
        after.load(stopped.facts())
        assert trained(after, moved_on, range(6, 9)) == pytest.approx(found)
        said = ["every was 2 before and is 3 now" in line for line in after.take_lines()]
        assert said == ([] if every == 2 else [True])


MOVEMENT = {"sparsity": {"kind": "movement", "density": 0.5}}


@pytest.mark.parametrize(
    ("tables", "prefix"), [(BY_GRADIENT, "freeze/gradient/"), (MOVEMENT, "sparsity/")], ids=["freeze", "movement"]
)
def test_a_loss_scale_is_not_in_what_a_run_sums(ranks, folder: Path, tables: dict[str, Any], prefix: str) -> None:
    def sums(scale: float) -> dict[str, Tensor]:
        precision = {"precision": {"kind": "float16", "loss_scale": scale}}
        state = ranks(1, train, BASE | tables | precision, str(folder), 0, 3)[0].state
        return {
            name: tensor for name, tensor in state.items() if name.startswith(prefix) and tensor.is_floating_point()
        }

    small, large = sums(1024.0), sums(8192.0)
    assert small
    for name, tensor in small.items():
        assert torch.allclose(large[name], tensor, rtol=0.1, atol=0.02 * float(tensor.abs().max())), name


@pytest.mark.parametrize("average", [EMA(decay=0.5), SWA(start=2, every=2)], ids=["ema", "swa"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_average_is_of_all_updates_frozen_weights_included(
    average: AverageConfig, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    """Of a weight that is frozen in updates 3 to 5 of 8: its average goes on, and the optimizer's state begins anew."""
    weight, other = Parameter(torch.ones(2, dtype=torch.float64)), Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = kind([weight, other], lr=0.1)
    keep_average(optimizer, average)
    resting = Resting(optimizer, average)
    seen: list[Tensor] = []
    for update in range(1, 9):
        other.grad, weight.grad = torch.ones_like(other), torch.full_like(weight, update)
        if 3 <= update <= 5:
            weight.grad = None
            resting.forget(weight)
        optimizer.step()
        if weight.grad is None:
            resting.updated(weight)
        seen.append(weight.detach().clone())
        wanted = functools.reduce(lambda a, x: (a + x) / 2, seen)
        if isinstance(average, SWA):
            wanted = torch.stack(seen[1::2]).mean(0) if update > 1 else seen[0]
        assert torch.allclose(optimizer.state[weight]["average"], wanted, rtol=1e-12, atol=0)
    assert float(optimizer.state[weight].get("step", 3)) == 3, "updates since it is trained again"


def test_a_pattern_names_parameters_or_modules() -> None:
    assert matches("blocks.0.attention.query.weight", ["blocks.0"])
    assert matches("blocks.0.attention.query.weight", ["*.query.weight"])
    assert not matches("blocks.10.attention.query.weight", ["blocks.1"])
    names = ["embedding.weight", "blocks.0.a", "blocks.0.b", "blocks.1.a", "norm.weight"]
    assert blocks_of(names) == [["embedding.weight", "blocks.0.a", "blocks.0.b"], ["blocks.1.a"]]
    config = FreezeConfig(later=(FreezeLater(layers=("blocks.0",), at=3, until=5),))
    assert [len(frozen_by_schedule(config, step, names)) for step in (2, 3, 4, 5)] == [0, 2, 2, 0]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (FreezeConfig(layers=("blocks.7",)), '"blocks.7" fits no parameter or module'),
        (FreezeConfig(layers=("*",)), "leaves nothing to train"),
        (FreezeConfig(layers=("*",), train=("head",)), 'freeze.train: "head" fits no'),
    ],
)
def test_what_cannot_be_frozen_is_refused(config: FreezeConfig, sentence: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=sentence):
        freeze(model, config)


def test_what_is_named_in_train_stays_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze(model, FreezeConfig(layers=("*",), train=("*.bias",)))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias", "1.bias"]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-3", "pipeline", "tensor"])
def test_verify_proves_a_half_frozen_model(ranks, folder: Path, layout: str) -> None:
    world, tables = LAYOUTS[layout]
    verdict, *_ = ranks(world, verified, BASE | HALF | tables, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]
