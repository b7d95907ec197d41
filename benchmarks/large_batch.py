"""`python -m benchmarks.large_batch`: what each optimizer makes of digits when the batch grows, at equal samples.

A net of two hidden layers sees `EPOCHS` epochs in steps of 16, 64, 256 and 1,024 samples. Rates are chosen for each
optimizer and batch by the accuracy on a fifth of the training set, of one seed; what is reported is the accuracy on the
held-out set, of three other seeds. "linear" and "root" have no rates of their own: they scale the one that was best for
16 samples, by the ratio of the batches or by its square root.

Trainings are kept in `--results`, one a line, so that a benchmark that was stopped goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report
from shoal.comm.collective import Alone
from shoal.data.corpora import digits
from shoal.experiments.results import interval
from shoal.models.build import initialise
from shoal.models.roles import roles_of
from shoal.models.small import MLP
from shoal.optim.build import build_optimizer, set_rate
from shoal.optim.config import SGD, AdamW, OptimizerConfig, Schedule
from shoal.optim.kinds import LAMB, LARS
from shoal.optim.layer_statistics import SeesLayers, layers_in
from shoal.optim.parts import Parts, SeesParts
from shoal.optim.preconditioned_config import KFAC, SOAP, Muon
from shoal.optim.schedule import rate
from shoal.state import Trained, owned_whole
from shoal.topology.holding import held
from shoal.topology.layout import Layout

EPOCHS, HIDDEN = 20, 128
BATCHES = (16, 64, 256, 1024)
SEEDS, TUNING_SEED = (1, 2, 3), 0
STEP = 3.0
"""Between two rates that are tried. One more is tried beyond the best for as long as that is at the end."""
KINDS: dict[str, tuple[OptimizerConfig, float]] = {
    "sgd": (SGD(momentum=0.9, weight_decay=1e-4), 0.03),
    "adamw": (AdamW(beta2=0.99, weight_decay=0.01, clip_norm=None), 2e-3),
    "lars": (LARS(coefficient=0.01), 1.0),
    "lamb": (LAMB(beta2=0.99, clip_norm=None), 1e-2),
    "muon": (Muon(adamw=("layers.2*",), clip_norm=None), 1e-2),
    "soap": (SOAP(adamw=("layers.2*",), clip_norm=None), 2e-3),
    "kfac": (KFAC(adamw=(), damping=1e-2, adamw_lr=None), 1e-2),
}
"""Each with the middle of the first three rates that are tried."""
SCALED = {"sgd, linear": ("sgd", 1.0), "adamw, linear": ("adamw", 1.0), "adamw, root": ("adamw", 0.5)}
"""From the best rate of 16 samples, by this power of the ratio."""
NAMES = ("sgd", "sgd, linear", "adamw", "adamw, linear", "adamw, root", "lars", "lamb", "muon", "soap", "kfac")
POINTS = 0.5


class Data:
    """Train, validation and test sets as tensors."""

    def __init__(self) -> None:
        (train, test) = (
            (torch.from_numpy(np.array(s.inputs)), torch.from_numpy(np.array(s.targets))) for s in digits()
        )
        cut = len(train[1]) // 5
        self.validation = tuple(each[:cut] for each in train)
        self.tuning, self.train, self.test = tuple(each[cut:] for each in train), train, test


def accuracy_of(kind: str, lr: float, batch: int, seed: int, data: Data, *, tuning: bool) -> float:
    """After training: on the validation set while `tuning`, else on the test set. 0 where it diverged."""
    x, y = data.tuning if tuning else data.train
    model = MLP(64, (HIDDEN, HIDDEN), outputs=10)
    initialise(model, seed=seed, device="cpu")
    optimizer, steps = _optimizer(model, kind, lr), EPOCHS * len(y) // batch
    schedule = Schedule(kind="cosine", warmup_steps=max(1, steps // 20), final_fraction=0.0)
    draw = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(y), generator=draw) for _ in range(EPOCHS + 1)])
    for step in range(1, steps + 1):
        chosen = order[(step - 1) * batch : step * batch]
        set_rate(optimizer, rate(schedule, lr, step=step, steps=steps))
        if not _step(model, optimizer, x[chosen], y[chosen], step):
            return 0.0
    inputs, targets = data.validation if tuning else data.test
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).double().mean())


def _optimizer(model: nn.Module, kind: str, lr: float) -> torch.optim.Optimizer:
    config, roles = KINDS[kind][0], roles_of(model)
    named = [(name, p, roles[name].decay) for name, p in model.named_parameters()]
    optimizer = build_optimizer(config, named, lr=lr, kinds={name: role.kind for name, role in roles.items()})
    if isinstance(optimizer, SeesLayers):
        optimizer.watch(layers_in(model, {id(p): name for name, p, _ in named}), Alone())
    if isinstance(optimizer, SeesParts):
        own = [owned_whole(Trained(held(Layout(), 0, name, tuple(p.shape)), p)) for name, p, _ in named]
        optimizer.connect(Parts(own, Alone(), Alone()))
    return optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> bool:
    """Whether the loss was finite."""
    seeing = optimizer if isinstance(optimizer, SeesLayers) else None
    if seeing is not None:
        seeing.begin(step)
        seeing.microbatch(torch.ones(len(y)))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if seeing is not None:
        seeing.agree(scale=1 / len(y), terms=len(y))
    optimizer.step()
    return bool(torch.isfinite(loss))


class Results:
    """Trainings that were made, by kind, rate, batch, seed and purpose; those that were not are made in `seconds`."""

    def __init__(self, path: Path, *, seconds: float) -> None:
        self._path, self._until, self._data = path, time.monotonic() + seconds, Data()
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {tuple(entry["of"]): entry["accuracy"] for entry in map(json.loads, lines)}

    def __call__(self, kind: str, lr: float, batch: int, seed: int, *, tuning: bool) -> float:
        """Raises `TimeoutError` where the time is over."""
        of = (kind, float(f"{lr:.6g}"), batch, seed, tuning)
        if of not in self._known:
            if time.monotonic() > self._until:
                raise TimeoutError
            self._known[of] = accuracy_of(kind, of[1], batch, seed, self._data, tuning=tuning)
            with self._path.open("a") as file:
                file.write(json.dumps({"of": of, "accuracy": self._known[of]}) + "\n")
        return self._known[of]

    def best_rate(self, kind: str, batch: int) -> float:
        """By validation; the grid goes on beyond its end for as long as the end is best."""
        tried = {power: self._tried(kind, batch, power) for power in (-1, 0, 1)}
        while (best := max(tried, key=tried.__getitem__)) in (min(tried), max(tried)):
            beyond = best + (1 if best == max(tried) else -1)
            if abs(beyond) > 6:
                break
            tried[beyond] = self._tried(kind, batch, beyond)
        return KINDS[kind][1] * STEP**best

    def _tried(self, kind: str, batch: int, power: int) -> float:
        return self(kind, KINDS[kind][1] * STEP**power, batch, TUNING_SEED, tuning=True)


def large_batch(
    results: Annotated[Path, typer.Option(help="Where trainings are kept.")] = Path("large_batch.jsonl"),
    minutes: Annotated[float, typer.Option(help="How long to train now.", min=0)] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Accuracy on held-out digits by optimizer and batch, at equal samples.

    Example: python -m benchmarks.large_batch --minutes 5
    """
    trained = Results(results, seconds=60 * minutes)
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        try:
            rows += [_row(trained, name, batch) for batch in BATCHES]
        except TimeoutError:
            print(f"not finished at {name}: the same command goes on from there")
            break
    print_report("large_batch", {"rows": rows, "checks": _checks(rows)}, as_json=as_json)


def _row(trained: Results, name: str, batch: int) -> dict[str, Any]:
    kind, power = SCALED.get(name, (name, 0.0))
    lr = trained.best_rate(kind, BATCHES[0] if power else batch) * (batch / BATCHES[0]) ** power
    found = [100 * trained(kind, lr, batch, seed, tuning=False) for seed in SEEDS]
    return {
        "optimizer": name,
        "batch": batch,
        "lr": float(f"{lr:.3g}"),
        "accuracy": round(sum(found) / len(found), 2),
        "half_interval": round(interval(found) or 0.0, 2),
    }


def _checks(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """16 times the batch beside once, in points."""
    at = {(row["optimizer"], row["batch"]): row["accuracy"] for row in rows}
    names = [name for name in NAMES if (name, BATCHES[2]) in at]
    lost: Result = {"rows": [], "checks": []}
    for name in names:
        fall = at[name, BATCHES[0]] - at[name, BATCHES[2]]
        lost["checks"].append(check(f"{name}: points lost at 16 times the batch", fall, POINTS, at_most=True))
    return lost["checks"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(large_batch)
