"""`shoal.federate` with a script's own training and evaluation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.api import ONLY_RUN
from shoal.errors import ConfigError, UsageError, UserCodeError
from shoal.federated.simulation import Simulation
from shoal.federated.strategy import RoundPlan, Strategy, Update
from tests.ports import free_port
from tests.waiting import HANG_S

SAMPLES = 60


def tables(folder: Path, **federated: Any) -> dict[str, Any]:
    return {
        "run": {"name": "own", "steps": 4, "directory": str(folder / "own")},
        "batch": {"global_samples": SAMPLES},
        "optimizer": {"kind": "sgd", "lr": 0.2, "weight_decay": 0.0, "clip_norm": None},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "federated": {"kind": "fedavg", "clients": 5, "local_steps": 1, **federated},
    }


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def one_step(module: nn.Module, samples: Any, *, round: int, lr: float) -> dict[str, float]:
    """A step of gradient descent on all of the client's samples, by PyTorch's optimizer."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    pairs = [samples[index] for index in range(len(samples))]
    loss = F.cross_entropy(module(torch.stack([x for x, _ in pairs])), torch.stack([y for _, y in pairs]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": float(loss.detach()), "steps": 1}


def accuracy(module: nn.Module) -> dict[str, float]:
    x, y = data().tensors
    return {"accuracy": float((module(x).argmax(1) == y).float().mean())}


def test_an_own_training_function_is_the_local_steps(tmp_path: Path) -> None:
    """A full-batch step of PyTorch's SGD, and Shoal's of the same batch: one model, one report."""
    config = tables(tmp_path, local_steps=None, local_epochs=1)
    shoals = shoal.federate(config, model=model, data=data(), evaluate=accuracy)
    whole = load_file(tmp_path / "own" / "model.safetensors")
    own = shoal.federate(config, model=model, data=data(), train=one_step, evaluate=accuracy)
    found = load_file(tmp_path / "own" / "model.safetensors")
    assert shoals is not None
    assert own is not None
    for name, weight in whole.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    rows = own["rounds"]
    assert len(rows) == 4
    for row, other in zip(rows, shoals["rounds"], strict=True):
        assert row["values"]["loss/train"] == pytest.approx(other["values"]["loss/train"], rel=1e-5)
        assert row["values"]["accuracy"] == other["values"]["accuracy"]


def test_what_an_own_function_draws_repeats_itself(tmp_path: Path) -> None:
    def noisy(module: nn.Module, samples: Any, *, round: int, lr: float) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    found = []
    for _ in range(2):
        shoal.federate(tables(tmp_path), model=model, data=data(), train=noisy)
        found.append(load_file(tmp_path / "own" / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Half(Strategy):
    """Half of what FedAvg does, and clients are told which round it is."""

    def begin(self, model: torch.Tensor, *, version: int) -> None:
        self.kept["round"] = torch.tensor([version + 1])

    def configure(self) -> RoundPlan:
        return RoundPlan(settings={"told": int(self.kept["round"])})

    def aggregate(self, model: torch.Tensor, updates: Sequence[Update], *, version: int) -> torch.Tensor:
        return model + 0.5 * self.mean(updates)


def test_an_own_strategy_aggregates_and_tells_clients(tmp_path: Path) -> None:
    """The model is FedAvg's of half the server's rate; a training function hears of the plan, and whose turn it is."""
    heard: set[tuple[int, str]] = set()

    def told(module: nn.Module, samples: Any, *, round: int, lr: float, client: str, settings: Any) -> dict[str, float]:
        assert settings == {"told": round}
        heard.add((round, client))
        return one_step(module, samples, round=round, lr=lr)

    shoal.federate(tables(tmp_path, server_lr=0.5), model=model, data=data(), train=one_step)
    expected = load_file(tmp_path / "own" / "model.safetensors")
    shoal.federate(tables(tmp_path), model=model, data=data(), train=told, strategy=Half)
    found = load_file(tmp_path / "own" / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    assert len(heard) == 4 * 5
    with pytest.raises(UsageError, match=r"give a subclass of shoal\.federated\.strategy\.Strategy"):
        shoal.federate(tables(tmp_path), model=model, data=data(), strategy="fedavg")
    with pytest.raises(ConfigError, match=r'strategy takes the place of federated\.kind = "fedopt"'):
        shoal.federate(tables(tmp_path, kind="fedopt"), model=model, data=data(), strategy=Half)


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("fine", "train returned 'fine': return numbers by name"),
        ({"steps": 0}, "steps = 0"),
        ({"a": float("nan")}, "nan"),
    ],
)
def test_what_a_training_function_must_not_return(returns: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=said):
        shoal.federate(tables(tmp_path), model=model, data=data(), train=lambda *a, **k: returns)


@pytest.mark.parametrize("kind", ["scaffold", "feddyn", "fedprox"])
def test_a_strategy_with_corrections_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="corrects each local step, which an own train function does not know of"):
        shoal.federate(tables(tmp_path, kind=kind), model=model, data=data(), train=one_step)


def test_clusters_need_models_that_differ(tmp_path: Path) -> None:
    """From draws of their own; an own training function trains the one that serves its samples best."""
    with pytest.raises(ConfigError, match="begins the same whatever the seed"):
        shoal.federate(tables(tmp_path, kind="clustered"), model=model, data=data())
    drawn = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    report = shoal.federate(
        tables(tmp_path, kind="clustered"), model=drawn, data=data(), train=one_step, evaluate=accuracy
    )
    assert (
        report["rounds"][-1]["values"]["clients/cluster 1"] + report["rounds"][-1]["values"]["clients/cluster 2"] == 5
    )
    assert set(report["clients"]["cluster"]) <= {1, 2}
    assert {path.name for path in (tmp_path / "own").glob("model*")} == {"model.safetensors", "model-2.safetensors"}


@pytest.mark.slow
def test_a_model_and_samples_in_the_style_of_transformers(tmp_path: Path) -> None:
    """One client, one step on all samples: SGD on the loss that the model itself computes from the labels."""
    transformers = pytest.importorskip("transformers")
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 8, "use_cache": False}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(2)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **still))
    tokens = torch.randint(0, 11, (6, 8))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    gpt2(input_ids=tokens, labels=tokens).loss.backward()
    expected = {name: (p - 0.2 * p.grad).detach().clone() for name, p in gpt2.named_parameters() if p.grad is not None}
    gpt2.zero_grad()
    config = tables(tmp_path, clients=1, local_steps=1)
    config["run"]["steps"] = 1
    config["batch"] = {"global_samples": 6}
    shoal.federate(config, ["devices.together=1"], model=gpt2, data=samples)
    found = load_file(tmp_path / "own" / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def test_a_configuration_without_clients_is_refused(tmp_path: Path) -> None:
    config = {name: table for name, table in tables(tmp_path).items() if name != "federated"}
    with pytest.raises(UsageError, match="no table \\[federated\\]"):
        shoal.federate(config, model=model, data=data())


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, ROOT)
import shoal
from tests.federated.test_task import accuracy, data, model, one_step, tables

folder, port, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
certificates = folder / "certificates"
if name == "server":
    role = shoal.FederatedServer(certificates, port=port)
else:
    part = int(name.removeprefix("c"))
    role = shoal.FederatedClient(f"127.0.0.1:{port}", certificates, name, part=part)
config = tables(folder, local_steps=None, local_epochs=1, clients=2)
keys = ["run.device=cpu", "layout.shard=2", "memory.zero=3"] if name == "c1" else []
train = None if keys else one_step
shoal.federate(config, keys, model=model, data=data(), train=train, evaluate=accuracy, role=role)
print("goes on", name)
"""


@pytest.mark.stress
def test_server_and_clients_by_a_script(tmp_path: Path) -> None:
    """Over TLS on loopback: the weights of the simulation. One client trains as it likes; the other is two ranks of the
    same script, which goes on behind the call once."""
    from shoal.federated.transport.enrol import enrol

    enrol(tmp_path / "certificates", names=["c0", "c1"], hosts=["127.0.0.1"], days=1)
    (tmp_path / "script.py").write_text(SCRIPT.replace("ROOT", repr(str(Path(__file__).parents[2]))))
    port = free_port()
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(port)]
    parts = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in ("server", "c0", "c1")]
    try:
        said = [part.communicate(timeout=HANG_S)[0].decode() for part in parts]
        assert [part.returncode for part in parts] == [0, 0, 0]
        assert [one.count("goes on") for one in said] == [1, 1, 1]
    finally:
        for part in parts:
            part.kill()
    found = load_file(tmp_path / "own" / "model.safetensors")
    config = tables(tmp_path / "simulated", local_steps=None, local_epochs=1, clients=2)
    shoal.federate(config, model=model, data=data(), train=one_step)
    wanted = load_file(tmp_path / "simulated" / "own" / "model.safetensors")
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_a_rank_of_a_later_call_does_not_play_an_earlier_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a client run the script up to their call: an earlier simulation tells them what it reported, and an
    earlier client is over."""
    report = shoal.federate(tables(tmp_path), model=model, data=data())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", ONLY_RUN: "of a later call"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Simulation, "run", lambda *_: pytest.fail("it is played again"))
    assert shoal.federate(tables(tmp_path), model=model, data=data()) == report
    client = shoal.FederatedClient("127.0.0.1:1", tmp_path, "clinic-a")
    assert shoal.federate(tables(tmp_path), model=model, data=data(), role=client) is None
    with pytest.raises(UsageError, match="whose report is not in"):
        shoal.federate(tables(tmp_path / "elsewhere"), model=model, data=data())
