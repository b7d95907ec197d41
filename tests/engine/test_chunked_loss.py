"""The loss by chunks of the tokens: the same numbers, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.check import checked
from shoal.engine.loss import ChunkedLoss, cross_entropy, in_chunks
from shoal.errors import ConfigError, UserCodeError
from shoal.memory.simulated_device import SimulatedDevice
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile
from tests.models.huggingface import architectures
from tests.verification.layouts import GPT, MOE, corpus, verified

EXACT = 1e-12
"""Float64 sums of the same terms; the weight's gradient is summed chunk by chunk."""
CHUNKS = {"memory": {"loss_chunks": 3}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"layout": {"replicate": 2}, "batch": {"micro_samples": 3}},
    "ZeRO-3, recomputed": {"layout": {"shard": 2}, "memory": {"loss_chunks": 3, "zero": 3, "recompute": "full"}},
    "tensor": {"layout": {"tensor": 2}},
    "tensor, sequence, tied": {"layout": {"tensor": 2, "sequence_parallel": True}, "model": GPT | {"tied": True}},
    "tensor grid": {"layout": {"tensor": 2, "tensor_grid": [2, 1]}},
    "1F1B, tied": {"layout": {"pipeline": 2}, "model": GPT | {"tied": True}},
    "zero bubble": {"layout": {"pipeline": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}},
    "PipeDream": {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}},
    "context": {"layout": {"context": 2}},
    "experts": {"layout": {"shard": 2, "expert": 2}, "model": MOE},
    "bfloat16": {"layout": {"replicate": 2}, "precision": {"kind": "bfloat16"}},
    "Llama in stages": {"layout": {"pipeline": 2}, "model": architectures.LLAMA},
    "Llama over tensor": {"layout": {"tensor": 2}, "model": architectures.LLAMA},
    "GPT-2": {"layout": {"shard": 2}, "model": architectures.GPT2},
}
QUICK = ("tensor, sequence, tied", "ZeRO-3, recomputed", "zero bubble")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.stress) for name in LAYOUTS]
)
def test_verify_finds_the_same_model_with_chunks(ranks, tmp_path: Path, layout: str) -> None:
    """Beside one process with all logits at once: loss, norm, every gradient, and the weights after two steps."""
    tables = CHUNKS | LAYOUTS[layout]
    if tables.get("model", {}).get("kind") == "transformers":
        pytest.importorskip("transformers")
    corpus(tmp_path)
    verdict, *_ = ranks(2, verified, tables, str(tmp_path), "precision" not in tables, 2)
    assert verdict["holds"], verdict["sentence"]


def _gpt(*, tied: bool = False, vocabulary: int = 50) -> nn.Module:
    model = build(GPTConfig(vocabulary=vocabulary, layers=1, width=16, heads=2, tied=tied))
    initialise(model, seed=0, device="cpu", dtype=torch.float64)
    return model


def _batch(vocabulary: int = 50, samples: int = 4, tokens: int = 32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocabulary, (2, samples, tokens), generator=random)
    drawn[1, 0, :5] = -100
    return drawn[0], drawn[1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [2, 7, 1000])
@pytest.mark.parametrize("expected", ["", "by token", "by sample"])
def test_losses_and_gradients_are_those_of_all_logits(tied: bool, chunks: int, expected: str) -> None:
    """Targets that are left out included, and more chunks than tokens; with gradients that are computed in the
    backward, and with the losses, for weights of tokens or of samples.
    """
    inputs, targets = _batch()
    plain, chunked = _gpt(tied=tied), _gpt(tied=tied)
    loss = in_chunks(chunked, cross_entropy, chunks)
    weights = torch.linspace(0, 1, targets.numel(), dtype=torch.float64).view(targets.shape)
    weights = weights[:, :1] if expected == "by sample" else weights
    if expected:
        assert loss.may_expect
        loss.expect(5 * weights[:, 0] if expected == "by sample" else 5 * weights)
    wanted, found = cross_entropy(plain(inputs), targets), loss(chunked(inputs), targets)
    assert torch.allclose(found, wanted, rtol=EXACT, atol=EXACT)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    for own, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.allclose(own.grad, other.grad, rtol=EXACT, atol=EXACT)


def test_all_logits_are_never_there() -> None:
    """Of a vocabulary that outweighs all else, the most that lives at once is what chunks of logits need."""
    vocabulary, chunks = 4096, 8
    inputs, targets = _batch(vocabulary, samples=16)
    whole_bytes = inputs.numel() * vocabulary * 8
    peaks = {}
    for name, divide in (("plain", 1), ("chunked", chunks), ("at once", chunks)):
        model = _gpt(vocabulary=vocabulary)
        loss = cross_entropy if divide == 1 else in_chunks(model, cross_entropy, divide)
        if name == "at once" and isinstance(loss, ChunkedLoss):
            loss.expect(torch.ones(16))
        device = SimulatedDevice(None)
        with device.counting():
            loss(model(inputs), targets).sum().backward()
        peaks[name] = device.take_peak()
    weight_bytes = vocabulary * 16 * 8
    assert peaks["plain"] > 2 * whole_bytes
    assert peaks["chunked"] < 4 * whole_bytes / chunks + 4 * weight_bytes < whole_bytes
    assert peaks["at once"] <= peaks["chunked"]


def test_losses_that_are_weighed_otherwise_than_announced_are_refused() -> None:
    """Their gradients would be others: no factor brings the one to the other."""
    inputs, targets = _batch()
    model = _gpt()
    loss = in_chunks(model, cross_entropy, 4)
    loss.expect(torch.ones(4))
    found = loss(model(inputs), targets)
    with pytest.raises(UserCodeError, match="weighed otherwise than was announced"):
        (found * torch.linspace(0, 1, 32)).sum().backward()
    for wrong in (50, -3):
        with pytest.raises(UserCodeError, match="targets must lie between 0 and 49"):
            loss(model(inputs), targets.masked_fill(targets == 7, wrong))


def test_without_gradients_the_model_gives_its_logits() -> None:
    """So that an evaluation judges them."""
    inputs, targets = _batch()
    model = _gpt()
    before = model(inputs)
    loss = in_chunks(model, cross_entropy, 4)
    with torch.no_grad():
        outputs = model(inputs)
        assert torch.equal(outputs, before)
        assert torch.equal(loss(outputs, targets), cross_entropy(before, targets))


class _Scaled(nn.Module):
    """Divides its logits by a temperature, which chunks of the head's product would leave out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = inner.head

    def parameter_roles(self) -> dict[str, Any]:
        roles = self.inner.parameter_roles()  # pyright: ignore[reportCallIssue]
        return {"head.weight": roles["head.weight"]} | {f"inner.{name}": role for name, role in roles.items()}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) / 2


def test_a_model_that_changes_its_logits_is_refused() -> None:
    inputs, targets = _batch()
    model = _Scaled(_gpt())
    loss = in_chunks(model, cross_entropy, 4)
    with pytest.raises(UserCodeError, match=r"not what its head 'inner\.head' gave"):
        loss(model(inputs), targets)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UserCodeError, match="Sequential names no head"):
        in_chunks(nn.Sequential(nn.Linear(3, 3)), cross_entropy, 2)


@pytest.mark.parametrize(
    ("tables", "said"),
    [({"loss": {"kind": "squared_error"}}, "loss.kind"), ({"run": {"compile": True}}, "run.compile = true")],
)
def test_what_chunks_cannot_do_is_refused_before_a_start(tables: dict[str, Any], said: str) -> None:
    whole = {
        "run": {"name": "a", "steps": 1, **tables.get("run", {})},
        "model": GPT | {"vocabulary": 256},
        "data": {"kind": "stdlib"},
        "batch": {"global_samples": 8, "sequence": 16},
        "memory": {"loss_chunks": 2},
        **{name: table for name, table in tables.items() if name != "run"},
    }
    with pytest.raises(ConfigError, match=f"memory.loss_chunks = 2 with {said}"):
        check_across(checked(whole, RunFile, file="a.toml"), file="a.toml")
