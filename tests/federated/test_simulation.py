"""The simulation: the same mathematics as training in one place, deterministic, and every algorithm in it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from shoal.assembly.federated import FromScript, federated_task, simulate
from shoal.assembly.objects import UserObjects
from shoal.checkpoint.weights import import_weights
from shoal.data.batches import read_batch
from shoal.data.corpora import Arrays, digits
from shoal.errors import ConfigError, EnvironmentFault, UsageError, UserCodeError
from shoal.federated.report import RoundFigures, row_of
from shoal.federated.rounds import Ticket
from shoal.federated.simulation import Simulation, data_for, shards_of
from shoal.federated.strategy import Update
from shoal.federated.transport.store import Store
from shoal.federated.work import ClientState, ClientWork, LocalRound, ServerModel
from tests.federated.tasks import run_file, task

TOLERANCE = 1e-6
"""The weights after some steps of SGD in float32, relative: the tolerance between layouts."""


def test_one_client_with_all_data_and_one_local_step_is_central_sgd() -> None:
    """Against a plain loop of PyTorch over the same batches, with weight decay and clipping."""
    keys: dict[str, Any] = {"optimizer": {"weight_decay": 0.01, "clip_norm": 0.5}}
    simulation = Simulation(
        task(run={"steps": 8}, federated={"clients": 1, "local_steps": 1, "evaluate_every": 8}, **keys)
    )
    start = simulation.task.model.clone()
    simulation.run()
    train, _ = digits()
    weight, bias = (part.clone().requires_grad_() for part in simulation.task.trainer.layout.views(start).values())
    optimizer = torch.optim.SGD([{"params": [weight], "weight_decay": 0.01}, {"params": [bias]}], lr=0.1)
    order = simulation.data_of("client-000000")
    for step in range(8):
        ids = order.samples_of_step(simulation.task.federated, 16, turn=step, step=0)
        images, targets = (torch.from_numpy(array[ids]) for array in (train.inputs, train.targets))
        optimizer.zero_grad()
        F.cross_entropy(F.linear(images.flatten(1), weight, bias), targets).backward()
        torch.nn.utils.clip_grad_norm_([weight, bias], 0.5)
        optimizer.step()
    expected = torch.cat([weight.detach().reshape(-1), bias.detach()])
    moved = float((expected - start).norm())
    assert float((simulation.server.model - expected).norm()) < TOLERANCE * float(expected.norm()) < moved


def test_the_first_model_is_that_of_a_warm_start(tmp_path: Path) -> None:
    """What a federated run has trained begins another; weights of another model are refused."""
    saved = {"layers.0.weight": torch.full((10, 64), 0.5), "layers.0.bias": torch.arange(10.0)}
    assert task().trainer.layout.names == tuple(saved)
    save_file(saved, tmp_path / "model.safetensors")
    imported = import_weights(tmp_path / "model.safetensors", tmp_path / "imported")
    found = task(run={"warm_start": str(imported)})
    assert torch.equal(found.model, torch.cat([one.reshape(-1) for one in saved.values()]))
    warm = run_file(run={"warm_start": str(tmp_path / "elsewhere")})
    assert federated_task(warm, real=True).model.shape == found.model.shape  # a client gets its model from the server
    with pytest.raises(UsageError, match="has another shape"):
        task(run={"warm_start": str(imported)}, model={"inputs": 32})


def test_a_simulation_repeats_itself_to_the_bit() -> None:
    """Also the times, the drop-outs and who took part; another seed gives another run."""
    keys: dict[str, Any] = {
        "federated": {"cohort": 4, "over_selection": 0.5, "least": 2},
        "devices": {"step_spread": 1.0, "link_spread": 1.0, "dropout": 0.2},
    }
    first, second = Simulation(task(**keys)), Simulation(task(**keys))
    assert first.run() == second.run()
    assert torch.equal(first.server.model, second.server.model)
    other = Simulation(task(run={"seed": 4}, **keys))
    other.run()
    assert not torch.equal(first.server.model, other.server.model)


def test_clients_that_train_together_train_as_alone() -> None:
    """One vmap over clients with different numbers of steps, or one client after the other."""
    keys: dict[str, Any] = {"partition": {"kind": "quantity"}, "federated": {"local_steps": None, "evaluate_every": 5}}
    together, alone = (Simulation(task(run={"steps": 2}, devices={"together": n}, **keys)) for n in (64, 1))
    together.run()
    alone.run()
    difference = float((together.server.model - alone.server.model).norm())
    assert difference < TOLERANCE * 10 * float(alone.server.model.norm())


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "fedavg"},
        {"kind": "fedavgm", "momentum": 0.5},
        {"kind": "fedprox", "mu": 0.1},
        {"kind": "fednova"},
        {"kind": "scaffold"},
        {"kind": "feddyn", "alpha": 0.1},
        {"kind": "fedopt", "rule": "adam", "server_lr": 0.1},
        {"kind": "fedopt", "rule": "yogi", "server_lr": 0.1},
        {"kind": "fedopt", "rule": "adagrad", "server_lr": 0.1},
        {"kind": "trimmed_mean"},
        {"kind": "median"},
        {"kind": "krum", "least": 8, "kept": 3},
        {"kind": "geometric_median"},
        {"kind": "fedbuff", "buffer": 4},
        {"kind": "fedavg", "sampling": "importance", "cohort": 4},
    ],
    ids=lambda keys: "-".join(map(str, list(keys.values())[:2])),
)
def test_every_algorithm_learns_digits(strategy: dict[str, Any]) -> None:
    """Eight clients, the classes mixed: a linear model is right on most held-out digits after few rounds."""
    keys = {"local_steps": 5, "evaluate_every": 8, **strategy}
    rows = Simulation(task(run={"steps": 8}, optimizer={"lr": 0.5}, federated=keys)).run()
    assert rows[-1].values["accuracy/eval"] > 0.65  # of ten classes
    assert len(rows) == 8


def test_without_rounds_slow_clients_do_not_hold_up_fast_ones() -> None:
    """FedBuff makes its models in less simulated time than FedAvg, where speeds differ."""
    devices = {"step_spread": 1.5}
    by_round = Simulation(task(run={"steps": 10}, devices=devices)).run()
    any_time = Simulation(task(run={"steps": 10}, devices=devices, federated={"kind": "fedbuff", "buffer": 8})).run()
    assert any_time[-1].time_s < by_round[-1].time_s / 2
    assert sum(row.counted for row in any_time) == 80


def test_over_selection_ends_a_round_with_the_first() -> None:
    """With half more clients asked, the round has its cohort before the slowest are there, who count not at all."""
    keys: dict[str, Any] = {"devices": {"step_spread": 1.0}, "federated": {"cohort": 4, "weights": "equal"}}
    plain = Simulation(task(**keys)).run()
    keys["federated"] |= {"over_selection": 1.0}
    over = Simulation(task(**keys)).run()
    assert {row.counted for row in over} == {4}
    assert {row.asked for row in over} == {8}
    assert over[-1].time_s < plain[-1].time_s


def test_a_round_waits_for_lost_clients_no_longer_than_its_deadline() -> None:
    rows = Simulation(task(devices={"dropout": 0.3}, federated={"deadline_s": 50.0, "least": 1})).run()
    assert any(row.lost for row in rows)
    assert rows[-1].time_s <= 5 * 50.0
    assert all(row.counted + row.lost == row.asked for row in rows)


def test_too_many_lost_clients_are_an_error() -> None:
    with pytest.raises(EnvironmentFault, match=r"lower federated\.least"):
        Simulation(task(devices={"dropout": 0.95}, federated={"least": 8})).run()


def test_an_update_beyond_the_largest_norm_is_refused_and_named() -> None:
    told: list[str] = []
    with pytest.raises(EnvironmentFault):
        Simulation(task(federated={"largest_norm": 1e-6}), told=told.append).run()
    assert "client client-000000 has norm" in told[0]


@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_a_secret_round_of_too_few_passes_and_privacy_counts_it(noise_by: str) -> None:
    """Poisson cohorts vary: one below `least` leaves the model as it was, and spends like any other."""
    keys: dict[str, Any] = {
        "run": {"steps": 8},
        "federated": {"cohort": 3, "least": 3, "local_steps": 1, "weights": "equal", "evaluate_every": 9},
        "privacy": {"noise": 4.0, "epsilon": 50.0, "noise_by": noise_by},
        "secure_aggregation": {"bits": 24},
    }
    told: list[str] = []
    simulation = Simulation(task(**keys), told=told.append)
    models, passed = [simulation.server.model], []
    rows = simulation.run(lambda _: models.append(simulation.server.model))
    for row, before, after in zip(rows, models, models[1:], strict=False):
        assert (row.counted == 0) == torch.equal(before, after)
        passed += [row.round] if row.counted == 0 else []
    assert 0 < len(passed) < len(rows) == 8
    assert [line.partition(":")[0] for line in told] == [f"round {n} passes without an update" for n in passed]
    assert all(row.attempts == 1 and (row.counted >= 3 or row.counted == 0) for row in rows)
    assert simulation.budget is not None
    assert rows[-1].values["privacy/epsilon"] == simulation.budget.spent(8)


def test_parameters_that_stay_local_never_leave() -> None:
    """The server's bias stays as it was; each client has its own. A pattern that fits nothing is refused."""
    simulation = Simulation(task(federated={"keep_local": ["*.bias"]}))
    simulation.run()
    start, end = (simulation.task.trainer.layout.views(v) for v in (simulation.task.model, simulation.server.model))
    assert torch.equal(start["layers.0.bias"], end["layers.0.bias"])
    assert not torch.equal(start["layers.0.weight"], end["layers.0.weight"])
    own = [state.own for state in simulation.states.values()]
    assert len(own) == 8
    assert all(one is not None and bool(one.count_nonzero() == 10) for one in own)
    each = simulation.clients()
    assert len(each["accuracy"]) == len(each["shared model"]) == 8
    assert each["accuracy"] != each["shared model"]
    with pytest.raises(ConfigError, match="no parameter is called 'head"):
        Simulation(task(federated={"keep_local": ["head.*"]}))


def test_ditto_trains_a_second_model_that_serves_each_client_better() -> None:
    """The shared model is FedAvg's to the bit; a client's own is that of a plain loop, and is right on more samples."""
    keys: dict[str, Any] = {"partition": {"kind": "dirichlet", "concentration": 0.1}, "run": {"steps": 3}}
    plain = Simulation(task(**keys))
    plain.run()
    ditto = Simulation(task(**keys, federated={"ditto": 0.5}))
    models = [ditto.server.model]
    ditto.run(lambda _: models.append(ditto.server.model))
    assert torch.equal(ditto.server.model, plain.server.model)
    one, name = ditto.task, ditto.names[2]
    trainer, data = one.trainer, ditto.data_of(name)
    own = models[0]
    for round in range(3):
        for step in range(3):
            ids = data.samples_of_step(one.federated, one.batch, turn=round, step=step)
            batch = read_batch(one.data.train, ids, ids, denominator=one.denominator).batch
            leaf = own.clone().requires_grad_()
            trainer.loss_of(leaf, batch.inputs, batch.targets, batch.weights).backward()
            assert leaf.grad is not None
            decayed = trainer.sgd.weight_decay * trainer.decays * own
            own = own - one.rate(round + 1) * (leaf.grad + 0.5 * (own - models[round]) + decayed)
    found = ditto.states[name].personal
    assert found is not None
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)
    each = ditto.clients()
    assert sum(each["accuracy"]) > sum(each["shared model"]) + 0.5


def test_own_parts_follow_their_client_alone() -> None:
    """A client that takes part for the first time begins from the shared model's parts, whoever trains beside it."""
    keys: dict[str, Any] = {"federated": {"keep_local": ["*.bias"], "cohort": 3}, "run": {"steps": 4}}
    together, alone = (Simulation(task(devices={"together": n}, **keys)) for n in (64, 1))
    together.run()
    alone.run()
    for name, state in alone.states.items():
        torch.testing.assert_close(together.states[name].own, state.own, rtol=1e-5, atol=1e-7)


def in_two_truths(**keys: Any) -> Simulation:
    """Eight clients of which the first four believe in one truth, the others in another (classes one on)."""
    keys = {"clients": 8, "local_steps": 10, **keys}
    one = task(run={"steps": 8}, optimizer={"lr": 0.5}, federated=keys, partition={"kind": "contiguous"})
    images, targets = digits()[0].inputs, digits()[0].targets
    both = Arrays(np.concatenate([images, images]), np.concatenate([targets, (targets + 1) % 10]))
    return Simulation(replace(one, data=replace(one.data, train=both)))


def test_clusters_find_clients_that_agree() -> None:
    """One model is right on half of the samples at most; of two, each client trains and gets the one of its truth."""
    one = in_two_truths()
    one.run()
    clustered = in_two_truths(kind="clustered", clusters=2)
    rows = clustered.run()
    each = clustered.clients()
    assert len(set(each["cluster"][:4])) == len(set(each["cluster"][4:])) == 1
    assert each["cluster"][0] != each["cluster"][4]
    assert min(each["accuracy"]) > 0.85
    assert sum(one.clients()["accuracy"]) / 8 < 0.6
    assert rows[-1].values["clients/cluster 1"] == rows[-1].values["clients/cluster 2"] == 4
    assert rows[-1].down_bytes == 2 * one.server.model.numel() * 4 * 8
    assert len(clustered.server.parameters()) == 2


def test_narrow_clients_train_corners() -> None:
    """A round beside plain PyTorch: each client's net is cut by hand, and each number averaged by hand over the clients
    that have it."""
    keys = {"kind": "heterofl", "clients": 5, "widths": [1.0, 0.5, 0.25], "local_steps": 2, "weights": "equal"}
    one = Simulation(
        task(
            run={"steps": 1}, model={"hidden": [10]}, federated=keys, optimizer={"weight_decay": 0.0, "clip_norm": None}
        )
    )
    start = {name: part.clone() for name, part in one.task.trainer.layout.views(one.server.model).items()}
    one.run()
    widths = one.clients()["width"]
    assert len(set(widths)) == 3
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    total, count = ({name: torch.zeros_like(start[name]) for name in names} for _ in range(2))
    for client, width in zip(one.names, widths, strict=True):
        hidden = {1.0: 10, 0.5: 5, 0.25: 3}[width]
        cuts = {
            names[0]: (slice(hidden),),
            names[1]: (slice(hidden),),
            names[2]: (slice(None), slice(hidden)),
            names[3]: (),
        }
        corner = [start[name][cuts[name]].clone().requires_grad_() for name in names]
        optimizer = torch.optim.SGD(corner, lr=0.1)
        for step in range(2):
            ids = one.data_of(client).samples_of_step(one.task.federated, 16, turn=0, step=step)
            images, targets = (torch.from_numpy(array[ids]) for array in (digits()[0].inputs, digits()[0].targets))
            optimizer.zero_grad()
            outputs = F.linear(F.relu(F.linear(images.flatten(1), corner[0], corner[1])), corner[2], corner[3])
            F.cross_entropy(outputs, targets).backward()
            optimizer.step()
        for name, after in zip(names, corner, strict=True):
            total[name][cuts[name]] += after.detach()
            count[name][cuts[name]] += 1
    end = one.task.trainer.layout.views(one.server.model)
    for name in names:
        wanted = torch.where(count[name] > 0, total[name] / count[name].clamp(min=1), start[name])
        torch.testing.assert_close(end[name], wanted, rtol=1e-5, atol=1e-6)


def test_narrow_models_have_corners_of_frozen_weights() -> None:
    """Drawn at their own width, these would be other features than the trained weights behind them are for."""

    def build(width: float = 1.0) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, int(8 * width)), torch.nn.ReLU())
        model.append(torch.nn.Linear(int(8 * width), 10))
        model[1].weight.requires_grad_(False)
        return model

    keys = {"kind": "heterofl", "clients": 4, "widths": [1.0, 0.5], "local_steps": 1}
    one = federated_task(run_file(federated=keys), FromScript(UserObjects(model=build)))
    whole, narrow = (dict(each.trainer.module.named_parameters()) for each in (one, one.corners[0].task))
    assert torch.equal(narrow["1.weight"], whole["1.weight"][:4])
    assert len(one.model) == 8 + 80 + 10


def test_a_client_of_another_width_has_nothing_left_to_send() -> None:
    """What a codec has not sent of its narrow model belongs to that one."""
    keys = {"kind": "heterofl", "clients": 2, "widths": [1.0, 0.5], "local_steps": 1}
    one = task(model={"hidden": [8]}, federated=keys, codec={"kind": "top_k", "fraction": 0.1})
    server, data = ServerModel(one), data_for(one, shards_of(one)[0], seed=0)
    state = ClientState()
    for version, width in enumerate((1, 0)):
        work = ClientWork(Ticket("client-000000", version, 0), data, state, width)
        ((update, state),) = LocalRound(one, server.strategy, server.model, server.plan()).train([work])
        assert state.residual is not None
        assert state.residual.shape == update.delta.shape == one.at_width(server.model, width).shape


def test_a_model_that_vmap_cannot_take_is_refused_with_the_repair() -> None:
    """And trains with clients one after another."""
    one = task()

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = one.trainer.module.layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.layers[0](x if float(x.sum()) > 0 else -x)  # type: ignore[index]

    branching = replace(one, trainer=replace(one.trainer, module=Branches()))
    with pytest.raises(UserCodeError, match=r"devices\.together = 1"):
        Simulation(branching).run()
    single = replace(branching, devices=type(one.devices)(together=1))
    assert len(Simulation(single).run()) == 5


def test_figures_that_are_not_finite_do_not_break_the_report(tmp_path: Path) -> None:
    """A mean that overflows is left out; a held-out loss that is not finite is null in the round's line, and the line
    is read all the same."""
    one = task()
    server, store = ServerModel(one), Store(tmp_path)
    updates = [Update(f"{i}", 0, 5, one.model * 0, metrics={"x/train": 1.7e308, "y/train": 2.0}) for i in range(2)]
    assert server.advance(updates) == {"y/train": 2.0}
    store.note(asdict(RoundFigures(1, values={"loss/eval": float("inf"), "y/train": 2.0})))
    assert [row_of(row) for row in store.rows()] == [RoundFigures(1, values={"y/train": 2.0})]
    store.journal.close()


def test_a_run_directory_that_is_a_file_is_refused_before_the_first_round(tmp_path, monkeypatch) -> None:
    """Rounds whose report has no place are not played."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/example").touch()
    lines: list[str] = []
    with pytest.raises(EnvironmentFault, match="runs/example is a file, and should be the run directory"):
        simulate(run_file(), told=lines.append)
    assert lines == []


def test_the_report_and_the_model_lie_in_the_run_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    result = simulate(run_file(), told=lines.append)
    kept = json.loads((tmp_path / "runs/example/federated.json").read_text())
    assert kept == json.loads(json.dumps(result))
    assert kept["totals"]["counted"] == 40
    assert kept["fairness"]["accuracy/worst"] <= kept["fairness"]["accuracy/median"]
    assert len(kept["clients"]["accuracy"]) == len(kept["clients"]["samples"]) == 8
    assert kept["clients"]["rounds"] == [5] * 8
    assert (tmp_path / "runs/example/model.safetensors").stat().st_size > 650 * 4
    assert "Fairness" in (tmp_path / "runs/example/report.html").read_text()
    assert len(lines) == 7
