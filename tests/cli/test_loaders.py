"""DataLoaders and data sets in any mixture, and a model of transformers with its own samples, as a script has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.observe.events import read_events
from tests.programs import run

SCRIPT = """
import sys
import torch, shoal
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(0)
x = torch.randn(48, 4, generator=g)
train, valid = [TensorDataset(part, (part.sum(1) > 0).long()) for part in (x[16:], x[:16])]
collate = lambda items: tuple(torch.stack(part) for part in zip(*items))
mixtures = {
    "loaders": (DataLoader(train, batch_size=8, shuffle=True), DataLoader(valid, batch_size=3)),
    "first": (DataLoader(train, batch_size=8, shuffle=True, collate_fn=collate), valid),
    "second": (train, DataLoader(valid, batch_size=3, collate_fn=collate)),
    "alone": DataLoader(train, batch_size=8, shuffle=True, drop_last=True),
    "neither": (train, valid),
}
net = torch.nn.Linear(4, 2)
torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
"""
TRAIN = (
    SCRIPT
    + """
for name, data in mixtures.items():
    tables = {"run": {"name": name, "steps": 4, "processes": 1}, "observe": {"report": False}}
    if name in ("second", "neither"):
        tables["batch"] = {"global_samples": 8}
    shoal.train({**tables, "optimizer": {"lr": 0.1}}, sys.argv[1:], model=lambda: net, data=data)
"""
)
START = (
    SCRIPT
    + """
for name, data in mixtures.items():
    net = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tables = {"run": {"name": name, "steps": 4, "processes": 1}, "observe": {"report": False}}
    with shoal.start(tables, model=net, optimizer=optimizer, data=data, batch_samples=8) as run:
        for a, b in run.batches():
            run.backward(torch.nn.functional.cross_entropy(net(a), b))
            run.step()
        if name != "alone":
            print(name, run.sum(sum(len(b) for _, b in run.held_out())))
    torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
"""
)
NAMES = ("loaders", "first", "second", "alone", "neither")


def losses(folder: Path) -> list[float]:
    return [loss for event in read_events(folder, 0) if (loss := event.get("loss/train")) is not None]


@pytest.mark.slow
@pytest.mark.parametrize("text", [TRAIN, START], ids=["train", "start"])
def test_any_mixture_of_loaders_and_data_sets_trains_alike(text: str, tmp_path: Path) -> None:
    """The same samples in the same steps, and all held-out ones, whatever they come in."""
    (tmp_path / "mine.py").write_text(text)
    done = run(["mine.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {name: losses(tmp_path / "runs" / name) for name in NAMES}
    assert all(len(each) == 4 for each in found.values())
    assert all(each == found["neither"] for each in found.values()), found
    if text is START:
        assert [line.split()[1] for line in done.stdout.splitlines() if line.split()[:1] in ([n] for n in NAMES)] == [
            "16.0"
        ] * 4


TRANSFORMERS = """
import sys
import torch, shoal
from transformers import GPT2Config, GPT2LMHeadModel
from torch.utils.data import DataLoader
config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0, bos_token_id=0, eos_token_id=0)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
g = torch.Generator().manual_seed(1)
rows = torch.randint(0, 32, (16, 12), generator=g)
lengths = torch.randint(6, 13, (16,), generator=g).tolist()
samples = [{"input_ids": row[:n], "attention_mask": torch.ones(n, dtype=torch.int64), "labels": row[:n].clone()}
           for row, n in zip(rows, lengths)]
samples[3]["labels"][:4] = -100

def collate(items):
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    together = torch.nn.utils.rnn.pad_sequence
    pad = lambda key, value: together([i[key] for i in items], batch_first=True, padding_value=value)
    return {key: pad(key, value) for key, value in pads.items()}

loader = DataLoader(samples, batch_size=8, collate_fn=collate)
if sys.argv[1] == "plain":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in [*loader, *loader]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
else:
    tables = {"run": {"name": sys.argv[1], "steps": 4}, "optimizer": {"kind": "sgd", "lr": 0.5, "momentum": 0.0},
              "schedule": {"kind": "constant"}, "observe": {"report": False}}
    data = (loader, samples) if sys.argv[1] == "loader" else (samples, loader)
    tables["batch"] = {"global_samples": 8}
    tables["data"] = {"shuffle": False}
    shoal.train(tables, sys.argv[2:], model=model, data=data)
"""
TOLERANCE = 1e-5
"""Relative, of losses in float32: docs/reference/tolerances.md."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loader", "samples"])
def test_a_model_of_transformers_trains_as_it_computes_its_loss(way: str, tmp_path: Path) -> None:
    """On two ranks that pad their own part of a batch: the losses that `model(**batch).loss` gives in one process."""
    (tmp_path / "mine.py").write_text(TRANSFORMERS)
    plain = run(["mine.py", "plain"], cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    done = run(["mine.py", way, "run.processes=2"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [float(line.split()[1]) for line in plain.stdout.splitlines() if line.startswith("loss ")]
    assert losses(tmp_path / "runs" / way) == pytest.approx(expected, rel=TOLERANCE)
    assert done.stdout.count("labels of each sample are its targets, moved by one token") == 1
