"""Strategies and client apps of the real Flower package, unchanged, under Shoal's rounds."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError, EnvironmentFault, UsageError, UserCodeError
from shoal.federated.config import FedAvgConfig
from shoal.federated.local_training import LocalTrainer
from shoal.federated.strategy import Update
from shoal.federated.vector import layout_of, vector_of
from shoal.optim.config import SGD
from tests.federated.test_task import SAMPLES, data, model, one_step, tables

pytest.importorskip(
    "flwr", reason="flwr is not installed: it asks for older protobuf, typer and rich than the development environment"
)

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping as Adaptive
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

from shoal.federated.flower import FlowerStrategy, _number_of

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def app_of(seen: list[dict[str, Any]]) -> ClientApp:
    """An app as Flower's documentation has it: its own data by `partition-id`, a step, and a reply."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        module = model()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        config = dict(message.content["config"])
        part, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
        rounds = context.state.metric_records.setdefault("rounds", MetricRecord({"seen": 0}))
        rounds["seen"] = int(rounds["seen"]) + 1
        seen.append({**config, "part": part, "seen": rounds["seen"]})
        x, y = (tensor[part::parts] for tensor in data().tensors)
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=config["lr"]).step()
        metrics = MetricRecord({"loss": float(loss.detach()), "num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def strided(module: nn.Module, samples: Any, *, round: int, lr: float, client: str) -> dict[str, float]:
    """The app's training as an own function."""
    number = int(client[-6:])
    return one_step(module, [data()[index] for index in range(number, SAMPLES, 5)], round=round, lr=lr)


def weights(folder: Path, **keys: Any) -> dict[str, Tensor]:
    shoal.federate(tables(folder), model=model, data=data(), **keys)
    return load_file(folder / "own" / "model.safetensors")


def test_an_app_and_a_strategy_make_the_model_of_an_own_function(tmp_path: Path) -> None:
    """Flower's FedAvg over five nodes against Shoal's; the app keeps its context from round to round."""
    seen: list[dict[str, Any]] = []
    expected = weights(tmp_path, train=strided)
    found = weights(tmp_path, train=app_of(seen), strategy=FedAvg())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE)
    assert sorted((one["server-round"], one["part"]) for one in seen) == [(r, p) for r in range(1, 5) for p in range(5)]
    assert all(one["seen"] == one["server-round"] for one in seen)


def test_an_app_trains_under_a_strategy_of_shoals(tmp_path: Path) -> None:
    expected = weights(tmp_path, train=strided)
    found = weights(tmp_path, train=app_of([]))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE)


def test_clients_are_told_what_the_strategy_configures(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    weights(tmp_path, train=app_of(seen), strategy=FedProx(proximal_mu=0.3))
    assert {one["proximal-mu"] for one in seen} == {0.3}


class Fitting(NumPyClient):
    """A client of the older interface."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts = part, parts

    def fit(self, parameters: Any, config: dict[str, Any]) -> tuple[Any, int, dict[str, float]]:
        module = model()
        names = list(module.state_dict())
        module.load_state_dict({n: torch.from_numpy(p) for n, p in zip(names, parameters, strict=True)})
        x, y = (tensor[self.part :: self.parts] for tensor in data().tensors)
        F.cross_entropy(module(x), y).backward()
        torch.optim.SGD(module.parameters(), lr=config["lr"]).step()
        return [tensor.numpy() for tensor in module.state_dict().values()], len(x), {}


def test_a_client_with_fit_trains_too(tmp_path: Path) -> None:
    expected = weights(tmp_path, train=strided)

    def client_fn(context: Context) -> Any:
        return Fitting(context.node_config["partition-id"], context.node_config["num-partitions"]).to_client()

    found = weights(tmp_path, train=ClientApp(client_fn=client_fn))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **CLOSE)


def trainer() -> LocalTrainer:
    module = model()
    layout = layout_of(module)
    return LocalTrainer(module, F.cross_entropy, layout, SGD(lr=0.1), torch.zeros(layout.numel))


class Remembers(FedAvg):
    """State of every kind that is kept, and a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.best: dict[int, tuple[Any, ...]] = {}
        self.metric = None
        self.losses = (len, str)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["lr"] *= 0.5
        self.seen.append((server_round, np.float32(0.1), b"x", float("inf"), OrderedDict(a=torch.ones(2))))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.best[server_round] = (arrays, metrics, True, "text", None)
        first = next(iter(arrays))
        arrays[first] = Array(arrays[first].numpy() + np.float32(len(self.seen) + len(self.best)))
        return arrays, metrics


@pytest.mark.parametrize(
    "kind",
    [
        FedAdam,
        FedYogi,
        lambda: FedAvgM(server_momentum=0.9),
        Remembers,
        lambda: Adaptive(FedAvgM(server_momentum=0.9), 0.0, 3, clipped_count_stddev=0.0),
    ],
    ids=["FedAdam", "FedYogi", "FedAvgM", "own", "wrapped"],
)
def test_a_strategy_goes_on_after_a_restart(kind: Any) -> None:
    """What it kept goes into a new object: the next model is that of the one that was never stopped."""
    one, config = trainer(), FedAvgConfig(clients=3)
    start = vector_of(one.module, one.layout)
    generator = torch.Generator().manual_seed(2)
    rounds = [
        [Update(str(i), r, 4 + i, torch.randn(len(start), generator=generator)) for i in range(3)] for r in range(3)
    ]
    going = again = FlowerStrategy(config, one, kind())
    expected = found = start
    for number, updates in enumerate(rounds):
        expected = going.aggregate(expected, updates, version=number)
    kept: dict[str, Tensor] = {}
    for number, updates in enumerate(rounds):
        again = FlowerStrategy(config, one, kind())
        again.kept = kept
        found = again.aggregate(found, updates, version=number)
        kept = {name: tensor.clone() for name, tensor in again.kept.items()}
        kept = load(save(kept))
    assert torch.equal(found, expected)
    assert not torch.equal(expected, start)
    assert again.configure() == going.configure()
    if kind is Remembers:
        assert going.configure().settings["lr"] == 0.1 * 0.5**3
        assert again._theirs.seen[0][:4] == (1, np.float32(0.1), b"x", float("inf"))


def test_the_sample_count_that_was_checked_weighs() -> None:
    """Not one that a client gives as a figure of its own."""
    one = trainer()
    start = vector_of(one.module, one.layout)
    updates = [
        Update(str(n), 0, n, torch.full_like(start, float(n)), metrics={"num-examples/train": 10.0**n}) for n in (1, 3)
    ]
    found = FlowerStrategy(FedAvgConfig(clients=3), one, FedAvg()).aggregate(start, updates, version=0)
    torch.testing.assert_close(found, start + (1 * 1 + 3 * 3) / 4, **CLOSE)


def test_replies_that_do_not_fit_together_are_a_sentence() -> None:
    one = trainer()
    start = vector_of(one.module, one.layout)
    updates = [Update(name, 0, 2, start * 0, metrics={f"{name}/train": 1.0}) for name in "ab"]
    with pytest.raises(EnvironmentFault, match=r"strategy FedAvg cannot aggregate what clients replied: .* same keys"):
        FlowerStrategy(FedAvgConfig(clients=3), one, FedAvg()).aggregate(start, updates, version=0)


def test_a_round_is_configured_once_and_the_rate_goes_on_from_what_the_strategy_made_of_it(tmp_path: Path) -> None:
    strategy, seen = Remembers(), list[dict[str, Any]]()
    weights(tmp_path, train=app_of(seen), strategy=strategy)
    assert [entry[0] for entry in strategy.seen] == [1, 2, 3, 4]
    first = tables(tmp_path)["optimizer"]["lr"]
    assert {one["server-round"]: one["lr"] for one in seen} == {r: first * 0.5**r for r in range(1, 5)}


def test_a_clients_part_is_given_or_is_the_number_in_its_name() -> None:
    assert _number_of("clinic-a", 5, 3) == 3
    assert _number_of("clinic-7", 5, 0) == 0
    assert _number_of("clinic-7", 5, None) == 2
    with pytest.raises(UsageError, match="client clinic-a has no number at the end of its name"):
        _number_of("clinic-a", 5, None)


class TellsBytes(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["secret"] = b"x"
        return super().configure_train(server_round, arrays, config, grid)


class Sends(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return grid.send_and_receive([])


class TellsEachNode(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        messages = super().configure_train(server_round, arrays, config, grid)
        for message in messages:
            message.content = RecordDict({"config": ConfigRecord({"node": message.metadata.dst_node_id})})
        return messages


class KeepsASet(FedAvg):
    def __init__(self) -> None:
        super().__init__()
        self.names = {"a"}


class Replaces(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.train_metrics_aggr_fn = lambda *_: MetricRecord()
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize(
    ("strategy", "error", "said"),
    [
        (FedAvg(min_train_nodes=6), ConfigError, "min_train_nodes = 6, and federated.clients is 5"),
        (Adaptive(FedAvg(min_available_nodes=6), 0.0, 3), ConfigError, "min_available_nodes = 6"),
        (TellsEachNode(), ConfigError, "tells its nodes different things"),
        (KeepsASet(), UserCodeError, "keeps a set in its attribute names"),
        (Replaces(), UserCodeError, "keeps a function in its attribute train_metrics_aggr_fn"),
        (FedAvg(min_available_nodes=6), ConfigError, "min_available_nodes = 6, and federated.clients is 5"),
        (TellsBytes(), ConfigError, "tells clients secret = b'x'"),
        (Sends(), UserCodeError, "calls grid.send_and_receive"),
    ],
)
def test_what_cannot_be_is_refused(strategy: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        weights(tmp_path, train=app_of([]), strategy=strategy)


def test_secret_sums_and_an_app_without_arrays_are_refused(tmp_path: Path) -> None:
    config = tables(tmp_path) | {"secure_aggregation": {}}
    with pytest.raises(ConfigError, match=r"\[secure_aggregation\] with a strategy of one's own"):
        shoal.federate(config, model=model, data=data(), strategy=FedAvg())
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"config": ConfigRecord()}), reply_to=message)

    with pytest.raises(UserCodeError, match="replied without an ArrayRecord"):
        weights(tmp_path, train=app)
