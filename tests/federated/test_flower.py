"""Strategies and client apps of the real Flower package, unchanged, under Shoal's rounds."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError, UserCodeError
from shoal.federated.config import FedAvgConfig
from shoal.federated.local_training import LocalTrainer
from shoal.federated.strategy import Update
from shoal.federated.vector import layout_of, vector_of
from shoal.optim.config import SGD
from tests.federated.test_task import SAMPLES, data, model, one_step, tables

pytest.importorskip(
    "flwr", reason="flwr is not installed: it asks for older protobuf, typer and rich than the development environment"
)

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, FedYogi

from shoal.federated.flower import FlowerStrategy

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


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_a_strategy_goes_on_after_a_restart(kind: Any) -> None:
    """What it kept goes into a new object: the next model is that of the one that was never stopped."""
    one, config = trainer(), FedAvgConfig(clients=3)
    start = vector_of(one.module, one.layout)
    generator = torch.Generator().manual_seed(2)
    rounds = [
        [Update(str(i), r, 4 + i, torch.randn(len(start), generator=generator)) for i in range(3)] for r in range(3)
    ]
    going = FlowerStrategy(config, one, kind())
    expected = found = start
    for number, updates in enumerate(rounds):
        expected = going.aggregate(expected, updates, version=number)
    kept: dict[str, Tensor] = {}
    for number, updates in enumerate(rounds):
        again = FlowerStrategy(config, one, kind())
        again.kept = kept
        found = again.aggregate(found, updates, version=number)
        kept = {name: tensor.clone() for name, tensor in again.kept.items()}
    assert torch.equal(found, expected)
    assert not torch.equal(expected, start)


class TellsBytes(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["secret"] = b"x"
        return super().configure_train(server_round, arrays, config, grid)


class Sends(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return grid.send_and_receive([])


@pytest.mark.parametrize(
    ("strategy", "error", "said"),
    [
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
