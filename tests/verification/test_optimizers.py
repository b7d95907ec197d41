"""Every optimizer of the run file in every layout: its proof, and its checkpoints from layout to layout."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from shoal.assembly.job import build_job, run_start
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.weights import weights_of
from shoal.engine.loop import steps
from shoal.observe.sink import Sinks
from shoal.optim.config import OptimizerConfig
from shoal.optim.declared import Common
from shoal.optim.layerwise import LayerwiseAdam
from shoal.runfile.rules import refusal
from tests.assembly.journey import Leg, travel, whole_state
from tests.ranks import TestPlace
from tests.sync.steps import opened
from tests.verification.layouts import corpus, run_file_of, verified
from tests.waiting import HANG_S

FLOAT64 = {"precision": {"kind": "float64"}}
SAME_MATH = 1e-12
"""Losses in float64, relative."""
OTHER_BASIS = 1e-3
"""Gradients of lower rank than their matrix have eigenvectors that last bits decide; 5e-5 was seen."""

DIFFERENCED = 1e-9
"""A product with the Hessian is a difference of gradients, which enlarges last bits."""
LESS_SAME = {"soap": OTHER_BASIS, "newton_cg": DIFFERENCED}

KEYS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "lars": {"coefficient": 0.1},
    "lamb": {"trust": "all"},
    "soap": {"every": 2, "adamw_lr": 5e-4},
    "shampoo": {"every": 2, "start": 1, "block": 24},
    "schedule_free_sgd": {"lr": 0.5},
    "muon": {"polish": 1, "adamw_lr": 1e-3, "heads": {"*.query.weight": 4}},
    "newton_cg": {"clip_norm": None, "cg_iterations": 3, "damping": 0.5},
    "lbfgs": {"clip_norm": None, "history": 2},
    "python": {"build": "torch.optim:Adamax"},
}
"""What a kind is given beside its defaults."""
ELSEWHERE = {
    "adamw_8bit": "tests/assembly/test_adamw_8bit.py",
    "kfac": "tests/verification/test_kfac.py",
    "one_bit_adam": "tests/assembly/test_codec.py",
    "zero_one_adam": "tests/assembly/test_codec.py",
    "one_bit_lamb": "tests/assembly/test_codec.py",
}
"""Kinds whose proofs are of another form, and where those are."""
OPTIMIZERS = {kind: KEYS.get(kind, {}) for kind in Common.kinds() if kind not in ELSEWHERE}
CONSTANT = ("schedule_free_adamw", "schedule_free_sgd", "newton_cg", "lbfgs")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "replicate 4": (4, {"layout": {"replicate": 4}}),
    "ZeRO-1 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 1}}),
    "ZeRO-2 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 2}}),
    "ZeRO-3 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 3}}),
    "replicate x ZeRO-3": (4, {"layout": {"replicate": 2, "shard": 2}, "memory": {"zero": 3}}),
    "ZeRO-1 x tensor": (4, {"layout": {"shard": 2, "tensor": 2}, "memory": {"zero": 1}}),
    "pipeline x tensor": (4, {"layout": {"pipeline": 2, "tensor": 2}}),
}
FEW = [
    ("rmsprop", "ZeRO-3"),
    ("nadam", "pipeline"),
    ("radam", "ZeRO-1"),
    ("lion", "tensor"),
    ("lars", "ZeRO-1 x tensor"),
    ("lamb", "ZeRO-3"),
    ("lamb", "pipeline x tensor"),
    ("adafactor", "ZeRO-3"),
    ("adafactor", "tensor"),
    ("soap", "replicate"),
    ("soap", "tensor"),
    ("schedule_free_adamw", "ZeRO-3"),
    ("muon", "replicate"),
    ("muon", "ZeRO-2"),
    ("muon", "ZeRO-1 x tensor"),
    ("muon", "pipeline"),
    ("newton_cg", "ZeRO-1"),
    ("lbfgs", "ZeRO-3"),
]
"""What every test run proves."""
SLOW = [("newton_cg", "pipeline x tensor"), ("shampoo", "ZeRO-1 x tensor"), ("dion", "ZeRO-1 x tensor")]
"""What CI proves besides."""
FEW_STEPS, STEPS = 4, 20
ROWS = [
    *((kind, layout, FEW_STEPS) for kind, layout in FEW),
    *(pytest.param(kind, layout, FEW_STEPS, marks=pytest.mark.slow) for kind, layout in SLOW),
    *(pytest.param(kind, layout, STEPS, marks=pytest.mark.stress) for layout in LAYOUTS for kind in OPTIMIZERS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers")
    corpus(folder)
    return folder


def tables_of(kind: str, layout: str) -> tuple[int, dict[str, Any]]:
    world, tables = LAYOUTS[layout]
    if kind in CONSTANT:
        tables = tables | {"schedule": {"kind": "constant", "warmup_steps": 2}}
    optimizer = {"kind": kind, "weight_decay": 0.1, "clip_norm": 0.5, **OPTIMIZERS[kind]}
    return world, {"run": {"steps": STEPS}, "optimizer": optimizer} | tables


def test_every_kind_is_proved() -> None:
    """Here or elsewhere: a member of the union without a proof would be trained with all the same."""
    assert {kind.__struct_config__.tag for kind in get_args(OptimizerConfig)} == {*OPTIMIZERS, *ELSEWHERE}
    assert KEYS.keys() <= OPTIMIZERS.keys()
    page = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    assert [kind for kind in Common.kinds() if f"| `{kind}`" not in page and f", `{kind}`" not in page] == []
    for kind, path in ELSEWHERE.items():
        assert kind in (Path(__file__).parents[2] / path).read_text()


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(("kind", "layout", "steps"), ROWS)
def test_it_is_proved_in_every_layout(ranks, folder: Path, kind: str, layout: str, steps: int) -> None:
    """`shoal verify` holds in float64: updates, norms and owners are those of one process."""
    world, tables = tables_of(kind, layout)
    verdict, *_ = ranks(world, verified, tables, str(folder), True, steps)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.stress) for k in ("lamb", "adafactor", "soap")] + ["muon"]
)
def test_servers_step_whole_parameters(ranks, folder: Path, kind: str) -> None:
    """A server has no other parts to ask, and needs none; and groups have their own rates there."""
    sync = {"sync": {"kind": "server", "admission": "sync"}, "layout": {"replicate": 2}}
    batch = {"batch": {"global_samples": 8, "denominator": "samples"}}
    optimizer = {"kind": kind, "clip_norm": None, **OPTIMIZERS[kind]}
    verdict, *_ = ranks(2, verified, {"optimizer": optimizer} | sync | batch, str(folder), True, 3)
    assert verdict["holds"], verdict["sentence"]


def verified_with_norms_of_parts(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The verdict on LAMB that takes the norm of a part for that of the whole."""
    whole = LayerwiseAdam.connect
    LayerwiseAdam.connect = lambda self, parts: None
    try:
        return verified(place, tables, folder, True, 2)
    finally:
        LayerwiseAdam.connect = whole


@pytest.mark.parametrize("layout", ["ZeRO-1", "tensor"])
def test_norms_of_parts_would_be_found(ranks, folder: Path, layout: str) -> None:
    """The proof has teeth."""
    world, tables = tables_of("lamb", layout)
    verdict, *_ = ranks(world, verified_with_norms_of_parts, tables, str(folder))
    assert not verdict["holds"]
    assert any(row["quantity"] == "weight" and not row["holds"] for row in verdict["rows"])


TRAVELLING = ("nadam", "muon", "soap")
MIXED = {"optimizer": {"kind": "muon", "groups": {"*embedding*": {"kind": "sgd", "momentum": 0.9}}}}
JOURNEY = ["ZeRO-3", "one", "tensor", "replicate", "pipeline", "ZeRO-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in TRAVELLING else pytest.mark.stress) for kind in OPTIMIZERS]
)
def test_a_checkpoint_goes_on_in_other_layouts(ranks, folder: Path, kind: str) -> None:
    """Every bit of the state comes over, and the losses are those of one process."""
    legs: list[Leg] = []
    for layout in JOURNEY:
        world, tables = tables_of(kind, layout)
        legs.append(ranks(world, travel, tables | FLOAT64, str(folder), f"journey-{kind}", 2)[0])
    world, tables = tables_of(kind, "one")
    straight = ranks(world, travel, tables | FLOAT64, str(folder), f"straight-{kind}", 2 * len(JOURNEY))[0]
    for here, there in pairwise(legs):
        assert here.left.keys() == there.came.keys()
        assert kind == "newton_cg" or any(name.startswith("optimizer/") for name in there.came)
        assert all(torch.equal(there.came[name], tensor) for name, tensor in here.left.items())
    found = [loss for leg in legs for loss in leg.losses]
    assert found == pytest.approx(straight.losses, rel=LESS_SAME.get(kind, SAME_MATH))
    assert straight.left.keys() == legs[-1].left.keys()


@pytest.mark.slow
def test_state_of_several_kinds_goes_on_in_other_layouts(ranks, folder: Path) -> None:
    """Muon's, AdamW's and SGD's."""
    legs: list[Leg] = []
    for layout in JOURNEY:
        world, tables = LAYOUTS[layout]
        legs.append(ranks(world, travel, MIXED | tables | FLOAT64, str(folder), "journey-mixed", 2)[0])
    straight = ranks(1, travel, MIXED | FLOAT64, str(folder), "straight-mixed", 2 * len(JOURNEY))[0]
    assert any(name.startswith("optimizer/momentum_buffer/") and "embedding" in name for name in straight.left)
    for here, there in pairwise(legs):
        assert all(torch.equal(there.came[name], tensor) for name, tensor in here.left.items())
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


@pytest.mark.parametrize("layout", ["ZeRO-1", "pipeline"])
def test_parameters_have_rates_and_decays_by_pattern(ranks, folder: Path, layout: str) -> None:
    """Groups and layers are those of the unsplit model, wherever ZeRO and pipelines cut."""
    groups = {"*embedding*": {"rate": 0.5, "weight_decay": 0.0}, "blocks.0.*": {"rate": 2.0}}
    tables = {"optimizer": {"kind": "adamw", "groups": groups, "layer_decay": 0.5}, **LAYOUTS[layout][1]}
    verdict, *_ = ranks(2, verified, tables, str(folder), True, 2)
    assert verdict["holds"], verdict["sentence"]


KINDS = {"*embedding*": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}, "*.bias": {"kind": "lion"}}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("adamw", "ZeRO-1"), ("muon", "pipeline")]
    + [pytest.param(k, n, marks=pytest.mark.stress) for k in ("adamw", "muon", "lamb", "soap") for n in LAYOUTS],
)
def test_groups_have_optimizers_of_their_own(ranks, folder: Path, kind: str, layout: str) -> None:
    """SGD and Lion beside the run's own, in every layout; planned state is that of all."""
    world, tables = LAYOUTS[layout]
    verdict, *_ = ranks(world, verified, {"optimizer": {"kind": kind, "groups": KINDS}} | tables, str(folder), True, 3)
    assert verdict["holds"], verdict["sentence"]


TRANSFORMS = [
    {"kind": "centralise"},
    {"kind": "clip_layer", "limit": 0.1},
    {"kind": "clip_adaptively", "limit": 0.02},
    {"kind": "add_noise", "std": 1e-3},
    {"kind": "clip_value", "limit": 2e-3},
]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in ("ZeRO-3", "tensor") else pytest.mark.stress) for name in LAYOUTS]
)
def test_transforms_are_those_of_one_process(ranks, folder: Path, layout: str) -> None:
    """Means of rows, norms of rows and parameters, and noise, wherever ranks cut."""
    world, tables = LAYOUTS[layout]
    optimizer = {"kind": "sgd", "lr": 1.0, "transforms": TRANSFORMS, "clip_norm": 0.5}
    verdict, *_ = ranks(world, verified, {"optimizer": optimizer} | tables, str(folder), True, 3)
    assert verdict["holds"], verdict["sentence"]


SCHEDULES: dict[str, dict[str, Any]] = {
    "stable": {"kind": "stable", "warmup_steps": 3},
    "one_cycle": {"kind": "one_cycle", "warmup_steps": 3},
    "polynomial": {"kind": "polynomial", "warmup_steps": 1},
    "step": {"kind": "step", "milestones": [3, 6]},
    "inverse_sqrt": {"kind": "inverse_sqrt", "warmup_steps": 2},
    "chained": {
        "kind": "chained",
        "warmup_steps": 2,
        "phases": [
            {"kind": "constant", "steps": 2},
            {"kind": "cosine", "final_fraction": 0.3, "steps": 3},
            {"kind": "linear", "final_fraction": 0.0},
        ],
    },
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_are_proved(ranks, folder: Path, kind: str) -> None:
    """Beside the schedule written down a second time."""
    verdict, *_ = ranks(1, verified, {"schedule": SCHEDULES[kind]}, str(folder), True, 1)
    assert verdict["holds"], verdict["sentence"]
    assert any(row["quantity"] == "rate" for row in verdict["rows"])


def evaluated(place: TestPlace, tables: dict[str, Any], folder: str, plainly: bool) -> float:
    """The loss on held-out data after three steps, which leaves the state as it is; `plainly`: of a model whose weights
    are the averages, and whose optimizer has none.
    """
    run = opened(place, tables | FLOAT64, folder, Path(folder) / "evaluated")
    with closing(run.feed()) as feed:
        for _ in range(3):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            run.step(run.state.progress.step, fed.microbatches, lr=0.05)
    if plainly:
        for parameter, state in run.state.optimizer.optimizer.state.items():
            parameter.data.copy_(state.pop("average"))
    before = whole_state(run)
    loss = run.evaluate()["loss/eval"]
    after = whole_state(run)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return loss


AVERAGES: dict[str, dict[str, Any]] = {
    "ema": {"optimizer": {"kind": "adamw", "average": {"kind": "ema", "decay": 0.5}}},
    "swa": {"optimizer": {"kind": "sgd", "average": {"kind": "swa", "start": 1}, "lookahead": {"every": 2}}},
    "schedule-free": {"optimizer": {"kind": "schedule_free_adamw"}, "schedule": {"kind": "constant"}},
}


@pytest.mark.parametrize(
    "average", [pytest.param(name, marks=[] if name == "ema" else pytest.mark.stress) for name in AVERAGES]
)
def test_runs_are_evaluated_under_their_averages(ranks, folder: Path, average: str) -> None:
    """As a model with these weights is, on one process and under ZeRO and tensor ranks."""
    tokens = str(folder / "tokens.bin")
    data = {"data": {"kind": "tokens", "path": tokens, "dtype": "uint8", "held_out": tokens}}
    tables = AVERAGES[average] | data | {"observe": {"evaluate_samples": 16}}
    wanted = ranks(1, evaluated, tables, str(folder), True)[0]
    layouts = ["one", "ZeRO-1", "ZeRO-3", "tensor"]
    found = [ranks(LAYOUTS[n][0], evaluated, tables | LAYOUTS[n][1], str(folder), False)[0] for n in layouts]
    assert found == pytest.approx([wanted] * len(layouts), rel=SAME_MATH)


@pytest.mark.parametrize(
    "kind", [pytest.param("adamw", marks=pytest.mark.stress), pytest.param("sgd", marks=pytest.mark.stress), "muon"]
)
def test_averages_and_slow_weights_travel(ranks, folder: Path, kind: str) -> None:
    """From ZeRO-3 to one process to replicas, in every bit."""
    keys = {"kind": kind, "average": {"kind": "swa", "start": 2}, "lookahead": {"every": 2}}
    legs: list[Leg] = []
    for layout in ("ZeRO-3", "one", "replicate"):
        world, tables = LAYOUTS[layout]
        tables = {"optimizer": keys} | tables | FLOAT64
        legs.append(ranks(world, travel, tables, str(folder), f"averages-{kind}", 3)[0])
    tables = {"optimizer": keys} | FLOAT64
    straight = ranks(1, travel, tables, str(folder), f"averages-straight-{kind}", 9)[0]
    for here, there in pairwise(legs):
        assert {name.split("/")[1] for name in there.came if name.startswith("optimizer/")} >= {
            "average", "averaged", "slow_weight", "looked",
        }  # fmt: skip
        assert all(torch.equal(there.came[name], tensor) for name, tensor in here.left.items())
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


def test_exported_weights_are_the_averages(ranks, folder: Path) -> None:
    """Of a checkpoint that holds some."""
    leg = ranks(1, travel, AVERAGES["ema"], str(folder), "exported", 3)[0]
    weights = weights_of(folder / "exported")
    assert {f"model/{name}" for name in weights} == {name for name in leg.left if name.startswith("model/")}
    averages = {n.removeprefix("optimizer/average/"): t for n, t in leg.left.items() if "/average/" in n}
    assert averages
    assert all(torch.equal(weights[name], tensor) for name, tensor in averages.items())


REFUSED = [
    ({"optimizer": {"kind": "schedule_free_sgd"}}, 'set schedule.kind = "constant"'),
    (
        {"optimizer": {"kind": "schedule_free_sgd", "average": {"kind": "ema"}}, "schedule": {"kind": "constant"}},
        "leave optimizer.average out",
    ),
    ({"optimizer": {"kind": "sgd", "average": {"kind": "ema"}}, "sync": {"kind": "local"}}, 'sync.kind = "allreduce"'),
    ({"optimizer": {"kind": "sgd", "lookahead": {}}, "sync": {"kind": "gossip"}}, 'sync.kind = "allreduce"'),
]


@pytest.mark.parametrize(("tables", "repair"), REFUSED)
def test_averages_are_refused_where_they_mean_nothing(folder: Path, tables: dict[str, Any], repair: str) -> None:
    """With what to do."""
    run_file = run_file_of(folder, **tables)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=2))
    sentence = refusal(run_file)
    assert sentence is not None
    assert repair in sentence


@pytest.mark.parametrize("kind", ["soap", pytest.param("adafactor", marks=pytest.mark.stress)])
def test_replicas_save_what_each_owns(ranks, folder: Path, kind: str) -> None:
    """A run's own checkpoint, of replicas that share the state of matrices, and its comparison of copies."""
    tables = {
        "run": {"directory": str(folder / f"owned-{kind}")},
        "optimizer": {"kind": kind},
        "layout": {"replicate": 2},
        "checkpoint": {"every_steps": 3},
        "observe": {"compare_every_steps": 2},
    }
    held = ranks(2, run_and_saved, tables, str(folder), f"owned-{kind}")
    names = {name for each in held for name in each if "/mean_rows/" in name or "/row_var/" in name}
    assert names
    assert not any(name in held[0] and name in held[1] for name in names)
    saved = {entry.name for entry in read_manifest(checkpoint_in(folder / f"owned-{kind}")).tensors}
    assert names <= saved


def run_and_saved(place: TestPlace, tables: dict[str, Any], folder: str, name: str) -> list[str]:
    """Six steps of `shoal train`; the names of what this rank holds of the state."""
    directory = Path(folder) / name
    run = opened(place, tables, folder, directory, 6)
    with ExitStack() as stack:
        sinks = stack.enter_context(Sinks())
        job = build_job(run, directory, sinks, stack, stop_requested=lambda: False)
        sinks.start(run_start(run))
        for pending in steps(job):
            pending.result = job.step(pending.number, pending.microbatches, lr=pending.lr)
        job.saver.wait(HANG_S)
        job.saver.close()
    return list(run.state.tensors())
