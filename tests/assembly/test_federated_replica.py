"""A federated client that is a replica of several ranks sends what a client of one process sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.api import _resolved
from shoal.assembly.federated import FromScript, federated_task
from shoal.assembly.federated_client import open_replica, replica_of
from shoal.assembly.federated_replica import Assignment, ReplicaRanks
from shoal.assembly.objects import UserObjects
from shoal.assembly.start import processes_of
from shoal.checkpoint.weights import save_weights
from shoal.errors import ConfigError, LayoutError, UsageError
from shoal.federated.client_data import ClientData
from shoal.federated.config import FederatedClient
from shoal.federated.rounds import Ticket
from shoal.federated.simulation import local_mask
from shoal.federated.strategy import RoundPlan, Update
from shoal.federated.task import OwnTraining, Task
from shoal.federated.work import ClientState, ClientWork, LocalRound
from shoal.launcher.environment import Place
from shoal.runfile.load import run_file_of
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from tests.ranks import TestPlace
from tests.waiting import HANG_S

CLOSE = {"rtol": 1e-7, "atol": 1e-11}
"""Of numbers in float64 that are summed in another order. PyTorch's kernel takes momentum and decay as float32: here
they are such numbers."""
CLIPPED = {"rtol": 1e-4, "atol": 1e-8}
"""In one process clipping adds 1e-6 to the norm, here about 0.1, as PyTorch does."""
ROUNDS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"layout": {"replicate": 2}},
    "zero1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "zero2": {"layout": {"shard": 2}, "memory": {"zero": 2}},
    "zero3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "tensor": {"layout": {"tensor": 2}},
    "pipeline": {"layout": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
    "context": {"layout": {"context": 2}},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": {"momentum": 0.75, "nesterov": True, "weight_decay": 0.125}},
    "fedprox": {"federated": {"kind": "fedprox", "mu": 0.5}, "optimizer": {"clip_norm": 0.05}},
    "scaffold": {"federated": {"kind": "scaffold"}, "optimizer": {"momentum": 0.5}},
    "feddyn": {"federated": {"kind": "feddyn", "alpha": 0.3}},
    "ditto": {"federated": {"ditto": 0.5}},
    "own head": {"federated": {"keep_local": ["*norm*"]}},
    "clustered": {"federated": {"kind": "clustered", "clusters": 2}},
    "coded": {"codec": {"kind": "top_k", "fraction": 0.1}},
}
EACH = set(zip(cycle(LAYOUTS), STRATEGIES, strict=False))
"""Each strategy on one layout, which `make test` runs; all of them on all are for `make stress`."""


def run_file(folder: Path, *more: dict[str, Any], script: FromScript = FromScript()) -> RunFile:
    """A small GPT of float64, or what the script hands over; a client has 27 samples, so that its last step of a round
    is short.
    """
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "example", "steps": 5, "seed": 3, "directory": str(folder), "device": "cpu"},
        "model": {"kind": "gpt", "width": 16, "layers": 2, "heads": 2},
        "data": {"kind": "stdlib"},
        "batch": {"global_samples": 8, "sequence": 16},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "schedule": {"kind": "constant"},
        "precision": {"kind": "float64"},
        "federated": {"kind": "fedavg", "clients": 4},
        "wire": {"timeout_s": HANG_S, "check_collectives": True},
    }
    for changed in more:
        for name, keys in changed.items():
            tables[name] = {**tables.get(name, {}), **keys}
    if (given := script.objects).model is not None:
        own = {name: table for name, table in tables.items() if name not in ("model", "data")}
        return _resolved(own, (), model=given.model, data=given.data, loss=None)[0]
    return run_file_of(tables, file="test")


ONE = FederatedClient("127.0.0.1:1", "certificates", "clinic-a")


def rounds(task: Task, samples: int) -> list[tuple[Update, ClientState]]:
    """Two rounds of one client, from models and plans that look like those of a run under way."""
    strategy, state, done = task.strategy(), ClientState(), []
    generator = torch.Generator().manual_seed(5)
    data = ClientData(np.arange(3, 3 + samples), seed=7)
    for version in range(ROUNDS):
        model = task.model + 0.02 * torch.randn(task.model.shape, generator=generator, dtype=task.model.dtype)
        strategy.begin(model, version=version)
        plan = strategy.configure()
        if plan.control is not None:
            noise = torch.randn(task.model.shape, generator=generator, dtype=task.model.dtype)
            plan = RoundPlan(plan.pull, 0.01 * noise, plan.settings, plan.others)
        ticket = Ticket("clinic-a", version, 0)
        update, state = LocalRound(task, strategy, model, plan, local_mask(task)).train(
            [ClientWork(ticket, data, state)]
        )[0]
        done.append((update, state))
    return done


def trained_by_ranks(
    place: TestPlace,
    tables: list[dict[str, Any]],
    folder: str,
    samples: int,
    script_of: Callable[[], FromScript] = FromScript,
    width: float = 1.0,
) -> Any:
    """What rank 0 would send; None on other ranks. `script_of` hands over a model and samples."""
    torch.manual_seed(place.rank)
    script = script_of()
    whole = run_file(Path(folder), {"run": {"processes": place.size}}, *tables, script=script)
    client = replace(ONE, width=width)
    replica = replica_of(whole, client)
    assert replica is not None
    check_across(replica, file="test")
    task = of_width(federated_task(whole, script), width) if place.rank == 0 else None
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_replica(whole, client, replica, here, script.objects, store=place.store)
    ranks = ReplicaRanks(run)
    if task is None:
        ranks.follow()
        return None
    found = rounds(task.trained_by(ranks), samples)
    ranks.dismiss()
    return found


def transformers_gpt2() -> FromScript:
    """A decoder of transformers with tied weights, and samples with labels, one of which has a label left out."""
    transformers = pytest.importorskip("transformers")
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8, "use_cache": False}
    torch.manual_seed(2)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = torch.randint(0, 11, (40, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[5, 3] = -100
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **still))
    return FromScript(UserObjects(model=model, data=data))


def half_frozen() -> FromScript:
    """A function that builds a model whose first layer does not train, and samples for it."""

    def model() -> nn.Module:
        layers = two_layers(8)
        layers[0].requires_grad_(False)
        return layers

    return FromScript(UserObjects(model=model, data=points()))


def of_several_widths() -> FromScript:
    """A function that builds a model of a width, and samples for it."""

    def model(width: float) -> nn.Module:
        return two_layers(int(8 * width))

    return FromScript(UserObjects(model=model, data=points()))


def two_layers(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def points() -> list[tuple[torch.Tensor, int]]:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(point, number % 2) for number, point in enumerate(inputs)]


def of_width(task: Task, width: float) -> Task:
    return task.of_width(task.federated.all_widths.index(width))


def require_equal(found: list[Any], expected: list[Any], close: dict[str, float]) -> None:
    for (update, state), (wanted, wanted_state) in zip(found, expected, strict=True):
        assert (update.steps, update.samples, update.cluster) == (wanted.steps, wanted.samples, wanted.cluster)
        assert update.metrics["loss/train"] == pytest.approx(wanted.metrics["loss/train"], rel=1e-7)
        pairs = [(update.delta, wanted.delta), (update.control, wanted.control)]
        pairs += [(getattr(state, n), getattr(wanted_state, n)) for n in ("kept", "own", "residual", "personal")]
        for one, other in pairs:
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, **close)
        assert float(wanted.delta.abs().max()) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [pytest.param(*pair, marks=[] if pair in EACH else pytest.mark.stress) for pair in product(LAYOUTS, STRATEGIES)],
)
def test_ranks_send_what_one_process_sends(layout: str, strategy: str, ranks: Any, tmp_path: Path) -> None:
    """Change, control and all that the client keeps, after two rounds whose last steps are short."""
    tables = [LAYOUTS[layout], STRATEGIES[strategy]]
    found = ranks(2, trained_by_ranks, tables, str(tmp_path), 27)[0]
    torch.set_num_threads(1)
    expected = rounds(federated_task(run_file(tmp_path, *tables)), 27)
    require_equal(found, expected, CLIPPED if strategy == "fedprox" else CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copies", "zero2", "zero3"])
def test_ranks_train_a_model_of_transformers(layout: str, ranks: Any, tmp_path: Path) -> None:
    """One that the script hands over, and that the ranks split in place."""
    tables = [LAYOUTS[layout], {"federated": {"kind": "scaffold"}}]
    found = ranks(2, trained_by_ranks, tables, str(tmp_path), 27, transformers_gpt2)[0]
    script = transformers_gpt2()
    expected = rounds(federated_task(run_file(tmp_path, *tables, script=script), script), 27)
    require_equal(found, expected, CLOSE)


@pytest.mark.parametrize("layout", ["copies", "zero3"])
def test_ranks_train_through_the_frozen_weights_of_a_warm_start(layout: str, ranks: Any, tmp_path: Path) -> None:
    """A server sends what trains; the rest comes from the checkpoint, to the ranks as to one process."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    save_weights(weights, Path("other"), tmp_path / "other")
    tables = [LAYOUTS[layout], {"run": {"warm_start": str(tmp_path / "other")}}]
    found = ranks(2, trained_by_ranks, tables, str(tmp_path), 27, half_frozen)[0]
    task = federated_task(run_file(tmp_path, *tables, script=half_frozen()), half_frozen())
    assert torch.equal(task.trainer.module.get_parameter("0.weight"), weights["0.weight"])
    require_equal(found, rounds(task, 27), CLOSE)


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_ranks_train_a_model_of_their_width(width: float, ranks: Any, tmp_path: Path) -> None:
    """One that a function of the script builds, which is told the width, the whole one too."""
    tables = [LAYOUTS["zero3"], {"federated": {"kind": "heterofl", "widths": [1.0, 0.5]}}]
    found = ranks(2, trained_by_ranks, tables, str(tmp_path), 27, of_several_widths, width)[0]
    task = federated_task(run_file(tmp_path, *tables, script=of_several_widths()), of_several_widths())
    require_equal(found, rounds(of_width(task, width), 27), CLOSE)


def test_a_client_with_fewer_samples_than_ranks_trains(ranks: Any, tmp_path: Path) -> None:
    """One rank has no sample of a step, and computes one that weighs nothing."""
    for tables in (LAYOUTS["copies"], LAYOUTS["zero3"]):
        found = ranks(2, trained_by_ranks, [tables], str(tmp_path), 1)[0]
        require_equal(found, rounds(federated_task(run_file(tmp_path, tables)), 1), CLOSE)


@pytest.mark.slow
def test_nothing_is_finite_after_a_step_that_is_not(ranks: Any, tmp_path: Path) -> None:
    """The engine would skip such a step; the update says what one process would say, and the server refuses it."""
    tables = [LAYOUTS["zero3"], {"optimizer": {"lr": 1e3, "momentum": 0.9}, "batch": {"global_samples": 1}}]
    found = ranks(2, trained_by_ranks, [*tables, {"batch": {"global_samples": 2}}], str(tmp_path), 200)[0]
    assert not any(bool(torch.isfinite(update.delta).any()) for update, _ in found)


def test_an_assignment_names_the_samples_of_each_step() -> None:
    steps = [np.array([4, 2], dtype=np.int64), np.array([9], dtype=np.int64)]
    found = Assignment(np.concatenate(steps).tobytes(), (2, 1), 0.1).steps
    assert [part.tolist() for part in found] == [[4, 2], [9]]


@pytest.mark.parametrize(
    ("tables", "train", "says"),
    [
        ({"privacy": {"unit": "sample"}}, None, 'privacy.unit = "sample" with a federated client of several ranks'),
        (
            {"gradients": {"schedule": "priority"}, "wire": {"check_collectives": False}},
            None,
            'gradients.schedule = "priority" with a federated client',
        ),
        ({"sync": {"kind": "local"}}, None, 'sync.kind = "local" with a federated client of several ranks'),
        ({}, len, "an own train function on a client of 2 ranks"),
    ],
)
def test_what_ranks_would_do_otherwise_is_refused(tables: dict, train: Any, says: str, tmp_path: Path) -> None:
    run = run_file(tmp_path, {"run": {"processes": 2}}, tables)
    with pytest.raises(ConfigError, match=re.escape(says)):
        replica_of(run, ONE, FromScript(own=OwnTraining(train)))


def test_one_rank_is_a_client_of_one_process(tmp_path: Path) -> None:
    assert replica_of(run_file(tmp_path), ONE) is None
    assert replica_of(run_file(tmp_path, {"layout": {"shard": 1}}), ONE) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {
            f"OMPI_COMM_WORLD_{n}": v
            for n, v in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items()
        },
    ],
)
def test_ranks_of_a_launcher_are_one_client(environ: dict[str, str], tmp_path: Path) -> None:
    """With no key that says so; each would be a whole client of the same name otherwise."""
    replica = replica_of(run_file(tmp_path), ONE, environ=environ)
    assert replica is not None
    assert replica.run.processes == 2
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert replica_of(run_file(tmp_path), ONE, environ=alone) is None
    with pytest.raises(ConfigError, match="an own train function on a client of 2 ranks"):
        replica_of(run_file(tmp_path), ONE, FromScript(own=OwnTraining(len)), environ=environ)


def test_a_layout_is_never_passed_over(tmp_path: Path) -> None:
    """One of several ranks with `run.processes = 1` is refused where ranks would start, as for every run."""
    replica = replica_of(run_file(tmp_path, {"run": {"processes": 1}, "layout": {"shard": 2}}), ONE)
    assert replica is not None
    with pytest.raises(LayoutError, match="shard=2"):
        processes_of(replica)


@pytest.mark.parametrize("client", [replace(ONE, part=4), replace(ONE, width=0.5)])
def test_a_client_that_the_run_has_not_is_refused_before_ranks_start(client: FederatedClient, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"parts are 0 to|trains the whole model"):
        replica_of(run_file(tmp_path, {"run": {"processes": 2}}), client)
