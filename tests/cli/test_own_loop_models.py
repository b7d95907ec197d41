"""Models as scripts bring them: compiled ones, and ones with batch norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shoal.observe.events import read_events
from tests.cli.warm_scripts import run_script

COMPILED = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
inputs = torch.randn(48, 8)
targets = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
COMPILE
run = shoal.start(model=model, optimizer=optimizer, data=torch.utils.data.TensorDataset(inputs, targets),
                  batch_samples=12, steps=4)
for x, y in run.batches():
    run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
run.export("weights.safetensors")
run.close()
"""
DCGAN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoal

torch.manual_seed(0)
nz = 4
images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
noise = torch.randn(48, nz, 1, 1, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(images, noise), batch_size=12, shuffle=True)
netG = nn.Sequential(
    nn.ConvTranspose2d(nz, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, 1, 1, bias=False),
    nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Flatten(0),
)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
run = shoal.start({"model": MODEL}, model=(netG, netD), optimizer=(optimizerG, optimizerD), data=loader, epochs=2)
criterion = nn.BCEWithLogitsLoss()
for real, z in run.batches():
    fake = netG(z)
    errD = criterion(netD(real), torch.ones(len(real))) + criterion(netD(fake.detach()), torch.zeros(len(real)))
    run.backward(errD, optimizer=optimizerD)
    optimizerD.step()
    errG = criterion(netD(fake), torch.ones(len(real)))
    run.backward(errG, optimizer=optimizerG)
    optimizerG.step()
run.export("weights.safetensors")
run.close()
"""
EVALUATED = """
import json
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoal

torch.manual_seed(0)
inputs, targets = torch.randn(36, 6).double(), torch.randint(0, 3, (36,))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs[:24], targets[:24]), batch_size=8)
held_out = inputs[24:], targets[24:]
LOOP
"""
PLAIN_LOOP = """
for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    model.eval()
    found.append(F.cross_entropy(model(held_out[0]), held_out[1]).item())
    model.train()
"""
OWN_LOOP = """
run = shoal.start({"model": {"batch_norm": "synchronised"}}, model=model, optimizer=optimizer, data=loader, epochs=3)
for epoch, batches in run.epochs():
    for x, y in batches:
        run.backward(F.cross_entropy(model(x), y))
        run.clip_grad_norm_(0.05)
        optimizer.step()
    model.eval()
    with torch.no_grad(), run.full_parameters():
        run.log({"loss/own": F.cross_entropy(model(held_out[0]), held_out[1])})
    model.train()
run.close()
"""
GROUPED = '{"batch_norm": "grouped", "group_samples": 4}'
SYNCHRONISED = '{"batch_norm": "synchronised"}'


def ran(folder: Path, text: str, *overrides: str, world: int) -> list[float]:
    """The losses of the script, on this many ranks."""
    folder.mkdir()
    (folder / "mine.py").write_text(text)
    codes = run_script(folder / "mine.py", folder, *overrides, world=world)
    assert codes == [0] * world, (folder / "rank-0.txt").read_text()
    return [loss for e in read_events(folder / "runs/mine", 0) if (loss := e.get("loss/train")) is not None]


@pytest.mark.stress
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path) -> None:
    """On two ranks under ZeRO-1: the same losses, and exported names of the plain module."""
    layout = ("layout.shard=2", "memory.zero=1")
    plain = ran(tmp_path / "plain", COMPILED.replace("COMPILE", ""), *layout, world=2)
    compiled = 'model = torch.compile(model, backend="eager")'
    found = ran(tmp_path / "compiled", COMPILED.replace("COMPILE", compiled), *layout, world=2)
    assert len(plain) == 4
    assert found == pytest.approx(plain, rel=1e-6)
    names = [set(load_file(tmp_path / name / "weights.safetensors")) for name in ("plain", "compiled")]
    assert names[0] == names[1]


def test_a_compiled_model_under_zero_3_is_refused(tmp_path: Path) -> None:
    text = COMPILED.replace("COMPILE", 'model.compile(backend="eager")')
    (tmp_path / "mine.py").write_text(text)
    assert run_script(tmp_path / "mine.py", tmp_path, "layout.shard=2", "memory.zero=3", world=2) == [2, 2]
    assert "the model is compiled, and under memory.zero = 3" in (tmp_path / "rank-0.txt").read_text()


OF_A_CLASS = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.first(x)), RATE, self.training))
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
def take(x, y):
    run.backward(loss_of(x, y))
    run.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(4, (48,)))
COMPILE
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=4)
for x, y in run.batches():
    take(x, y)
run.close()
"""


def of_a_class(line: str = "", *, dropout: float = 0.0) -> str:
    return OF_A_CLASS.replace("COMPILE", line).replace("RATE", str(dropout))


def compiled(what: str, backend: str = "eager", *, dropout: float = 0.0) -> str:
    return of_a_class(f'{what} = torch.compile({what}, backend="{backend}")', dropout=dropout)


NOT_COMPILED = of_a_class()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "loss_of", pytest.param("take", marks=pytest.mark.stress)])
def test_what_a_script_compiles_trains_as_the_plain_one(what: str, tmp_path: Path) -> None:
    """The model, a function that calls it, or the whole step: Shoal's hooks are no part of the program."""
    keys = ("layout.shard=2", "memory.zero=1", "batch.micro_samples=3")
    wanted = ran(tmp_path / "plain", NOT_COMPILED, *keys, world=2)
    assert ran(tmp_path / "compiled", compiled(what), *keys, world=2) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_what_a_compiled_model_draws_is_told(tmp_path: Path) -> None:
    """Dropout in a program is PyTorch's own, and other numbers on other ranks."""
    ran(tmp_path / "own", compiled("model", "aot_eager", dropout=0.5), world=2)
    assert "torch.compile has made for the script draws random numbers" in (tmp_path / "own/rank-0.txt").read_text()


@pytest.mark.slow
def test_what_a_model_draws_within_a_compiled_function_is_keyed(tmp_path: Path) -> None:
    """Its random functions are no part of the function's program."""
    text = compiled("loss_of", "aot_eager", dropout=0.5)
    wanted = ran(tmp_path / "one", text, world=1)
    assert ran(tmp_path / "two", text, "batch.micro_samples=2", world=2) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_compiled_function_under_zero_3_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(compiled("loss_of"))
    assert run_script(tmp_path / "mine.py", tmp_path, "layout.shard=2", "memory.zero=3", world=2) == [2, 2]
    assert "the script compiles a function that calls the model" in (tmp_path / "rank-0.txt").read_text()


def test_a_model_in_float64_trains_in_it(tmp_path: Path) -> None:
    """Losses and weights are those of plain PyTorch to the last digits of float64."""
    double = "model, inputs = model.double(), inputs.double()"
    text = COMPILED.replace("COMPILE", double).replace("shoal.start(", 'shoal.start({"data": {"shuffle": False}}, ')
    found = ran(tmp_path / "own", text, world=2)
    names: dict[str, Any] = {}
    exec(text.partition("run = shoal.start")[0], names)
    losses = []
    for first in range(0, 48, 12):
        names["optimizer"].zero_grad()
        outputs = names["model"](names["inputs"][first : first + 12])
        loss = names["F"].cross_entropy(outputs, names["targets"][first : first + 12])
        loss.backward()
        names["optimizer"].step()
        losses.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-13)
    weight = load_file(tmp_path / "own/weights.safetensors")["0.weight"]
    assert (weight - names["model"][0].weight).abs().max().item() < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("norms", [GROUPED, pytest.param(SYNCHRONISED, marks=pytest.mark.stress)], ids=["4", "all"])
def test_batch_norms_of_a_gan(tmp_path: Path, norms: str) -> None:
    """Statistics over groups of 4, or of all ranks: losses, weights and running statistics of one rank on three."""
    one = ran(tmp_path / "one", DCGAN.replace("MODEL", norms), world=1)
    three = ran(tmp_path / "three", DCGAN.replace("MODEL", norms), world=3)
    assert len(one) == 8
    assert three == pytest.approx(one, rel=1e-5)
    weights, wanted = (load_file(tmp_path / name / "weights.safetensors") for name in ("three", "one"))
    assert {name for name in wanted if "running_mean" in name} == {"0.1.running_mean", "1.3.running_mean"}
    for name, weight in weights.items():
        assert weight.double().norm().item() == pytest.approx(wanted[name].double().norm().item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("layout.shard=2", "memory.zero=3")], ids=["replicated", "ZeRO-3"])
def test_a_test_behind_an_epoch_sees_the_weights_and_the_statistics_of_its_last_step(
    layout: tuple[str, ...], tmp_path: Path
) -> None:
    """Each epoch's loss on held-out samples, with clipped gradients, is that of plain PyTorch."""
    found: list[float] = []
    exec(EVALUATED.replace("LOOP", PLAIN_LOOP), {"found": found})
    ran(tmp_path / "own", EVALUATED.replace("LOOP", OWN_LOOP), *layout, world=2)
    events = read_events(tmp_path / "own/runs/mine", 0)
    assert [value for e in events if (value := e.get("loss/own")) is not None] == pytest.approx(found, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "over"),
    [
        ("nn.BatchNorm2d(8)", "(BatchNorm2d) takes statistics over the samples of one microbatch of one rank"),
        ("nn.SyncBatchNorm(8)", "(SyncBatchNorm) takes statistics over one microbatch of the ranks, on GPUs alone"),
    ],
)
def test_batch_norms_of_which_nothing_is_said_are_refused(tmp_path: Path, norm: str, over: str) -> None:
    (tmp_path / "mine.py").write_text(DCGAN.replace("MODEL", "{}").replace("nn.BatchNorm2d(8)", norm))
    assert run_script(tmp_path / "mine.py", tmp_path, world=2) == [2, 2]
    said = (tmp_path / "rank-0.txt").read_text()
    assert over in said
    assert 'set model.batch_norm = "synchronised"' in said
