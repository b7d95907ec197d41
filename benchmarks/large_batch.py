"""`python -m benchmarks.large_batch`: what each optimizer makes of a task when the batch grows, at equal samples.

`--task digits`: a net of two hidden layers sees 20 epochs in steps of 16, 64, 256 and 1,024 samples. `--task text`: a
small GPT sees 8,192 sequences of the standard library's source in steps of 4, 16, 64 and 256.

Rates are chosen for each optimizer and batch by the validation set, of one seed; what is reported is the score on the
held-out set, of three other seeds: accuracy in percent, or loss in nats a byte. "linear" and "root" have no rates of
their own: they scale the one that was best for the smallest batch, by the ratio of the batches or by its square root.
Of text, the optimizers of matrices are also trained on three quarters of the samples: is their loss AdamW's by then?

Trainings are kept in `--results`, one a line, so that a benchmark that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report
from shoal.data.corpora import digits, stdlib_folder, stdlib_sources
from shoal.experiments.results import interval
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.roles import roles_of
from shoal.models.small import MLP
from shoal.optim.build import build_optimizer, set_rate
from shoal.optim.config import SGD, AdamW, OptimizerConfig, Schedule
from shoal.optim.kinds import LAMB, LARS
from shoal.optim.layer_statistics import SeesLayers, watch_alone
from shoal.optim.matrix_kinds import KFAC, SOAP, Muon
from shoal.optim.schedule import rate

SEEDS, TUNING_SEED = (1, 2, 3), 0
STEP = 3.0
"""Between two rates that are tried. One more is tried beyond the best for as long as that is at the end."""
SCALED = {"sgd, linear": ("sgd", 1.0), "adamw, linear": ("adamw", 1.0), "adamw, root": ("adamw", 0.5)}
"""From the best rate of the smallest batch, by this power of the ratio."""
NAMES = ("sgd", "sgd, linear", "adamw", "adamw, linear", "adamw, root", "lars", "lamb", "muon", "soap", "kfac")
SHORTENED, SHARE = ("adamw", "muon", "soap", "kfac"), 0.75
"""Trained on this share of the samples, too."""
Examples = tuple[Tensor, Tensor]


class Task(Protocol):
    """What is trained, and how it is scored."""

    batches: tuple[int, ...]
    samples: int
    kinds: Mapping[str, tuple[OptimizerConfig, float]]
    """Each with the middle of the first three rates that are tried."""
    sign: float
    """1 where a higher score is better, -1 where a lower one is."""
    worst: float
    """The score of a training that diverged."""
    allowed: tuple[str, float]
    """What may be lost at 16 times the batch: its unit, and how much."""

    def model(self) -> nn.Module: ...

    def examples(self, seed: int, *, tuning: bool) -> Callable[[int, int], Examples]:
        """The inputs and targets of samples from .. to of a run's order."""
        ...

    def score(self, model: nn.Module, *, tuning: bool) -> float:
        """On the validation set while `tuning`, else on the test set."""
        ...

    def lost(self, once: float, large: float) -> float:
        """What of the score `once` the score `large` has lost, in the unit of `allowed`."""
        ...


class Digits:
    """Train, validation (a fifth of it while rates are tuned) and test sets of digits."""

    batches, sign, worst, allowed = (16, 64, 256, 1024), 1.0, 0.0, ("points", 0.5)
    kinds: Mapping[str, tuple[OptimizerConfig, float]] = {
        "sgd": (SGD(momentum=0.9, weight_decay=1e-4), 0.03),
        "adamw": (AdamW(beta2=0.99, weight_decay=0.01, clip_norm=None), 2e-3),
        "lars": (LARS(coefficient=0.01), 1.0),
        "lamb": (LAMB(beta2=0.99, clip_norm=None), 1e-2),
        "muon": (Muon(adamw=("layers.2*",), clip_norm=None), 1e-2),
        "soap": (SOAP(adamw=("layers.2*",), clip_norm=None), 2e-3),
        "kfac": (KFAC(adamw=(), damping=1e-2, adamw_lr=None), 1e-2),
    }
    _epochs, _hidden = 20, 128

    def __init__(self) -> None:
        (train, test) = (
            (torch.from_numpy(np.array(s.inputs)), torch.from_numpy(np.array(s.targets))) for s in digits()
        )
        cut = len(train[1]) // 5
        self._held_out = {True: tuple(each[:cut] for each in train), False: test}
        self._train = {True: tuple(each[cut:] for each in train), False: train}
        self.samples = self._epochs * len(train[1])

    def model(self) -> nn.Module:
        return MLP(64, (self._hidden, self._hidden), outputs=10)

    def examples(self, seed: int, *, tuning: bool) -> Callable[[int, int], Examples]:
        x, y = self._train[tuning]
        draw = torch.Generator().manual_seed(seed)
        order = torch.cat([torch.randperm(len(y), generator=draw) for _ in range(2 * self._epochs)])
        return lambda start, stop: (x[order[start:stop]], y[order[start:stop]])

    def score(self, model: nn.Module, *, tuning: bool) -> float:
        inputs, targets = self._held_out[tuning]
        return 100 * float((model(inputs).argmax(1) == targets).double().mean())

    def lost(self, once: float, large: float) -> float:
        return once - large


class Text:
    """Source of the standard library as bytes: of every ten files one is for validation, and one for tests."""

    batches, samples, sign, allowed = (4, 16, 64, 256), 8192, -1.0, ("percent of the loss", 2.0)
    worst = math.log(256)
    kinds: Mapping[str, tuple[OptimizerConfig, float]] = {
        "sgd": (SGD(momentum=0.9), 0.1),
        "adamw": (AdamW(beta2=0.99, weight_decay=0.01), 5e-3),
        "lars": (LARS(coefficient=0.01), 3.0),
        "lamb": (LAMB(beta2=0.99), 2e-2),
        "muon": (Muon(weight_decay=0.01), 1e-2),
        "soap": (SOAP(), 5e-3),
        "kfac": (KFAC(adamw_lr=5e-3), 3e-2),
    }
    _sequence, _scored = 32, 1024
    _config = GPTConfig(layers=2, width=48, heads=2, feed_forward="gelu", feed_forward_width=192)

    def __init__(self) -> None:
        files = [path.read_bytes() for path in stdlib_sources(stdlib_folder())]
        parts = {"validation": files[0::10], "test": files[1::10]}
        parts["train"] = [text for n, text in enumerate(files) if n % 10 > 1]
        self._of = {name: torch.frombuffer(bytearray(b"".join(own)), dtype=torch.uint8) for name, own in parts.items()}

    def model(self) -> nn.Module:
        return build(self._config)

    def examples(self, seed: int, *, tuning: bool) -> Callable[[int, int], Examples]:
        starts = self._starts("train", 2 * self.samples, seed)
        return lambda start, stop: self._windows("train", starts[start:stop])

    def score(self, model: nn.Module, *, tuning: bool) -> float:
        name = "validation" if tuning else "test"
        return float(_loss(model, *self._windows(name, self._starts(name, self._scored, seed=0))))

    def lost(self, once: float, large: float) -> float:
        return 100 * (large / once - 1)

    def _starts(self, name: str, count: int, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(len(self._of[name]) - self._sequence, (count,), generator=draw)

    def _windows(self, name: str, starts: Tensor) -> Examples:
        found = self._of[name][starts[:, None] + torch.arange(self._sequence + 1)].long()
        return found[:, :-1], found[:, 1:]


TASKS: dict[str, Callable[[], Task]] = {"digits": Digits, "text": Text}


def score_of(task: Task, kind: str, lr: float, batch: int, seed: int, *, tuning: bool, share: float = 1.0) -> float:
    """After training on `share` of the samples; `task.worst` where it diverged."""
    model = task.model()
    initialise(model, seed=seed, device=torch.device("cpu"))
    config = task.kinds[kind][0]
    optimizer, steps = _optimizer(model, config, lr), int(share * task.samples) // batch
    schedule = Schedule(kind="cosine", warmup_steps=max(1, steps // 20), final_fraction=0.0)
    examples = task.examples(seed, tuning=tuning)
    for step in range(1, steps + 1):
        set_rate(optimizer, rate(schedule, lr, step=step, steps=steps))
        if not _step(model, optimizer, config.clip_norm, *examples((step - 1) * batch, step * batch), step):
            return task.worst
    with torch.no_grad():
        found = task.score(model, tuning=tuning)
    return found if math.isfinite(found) else task.worst


def _optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    roles = roles_of(model)
    named = [(name, p, roles[name].decay) for name, p in model.named_parameters()]
    optimizer = build_optimizer(config, named, lr=lr, kinds={name: role.kind for name, role in roles.items()})
    if isinstance(optimizer, SeesLayers):
        watch_alone(optimizer, model)
    return optimizer


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None, x: Tensor, y: Tensor, step: int
) -> bool:
    """Whether the loss was finite."""
    seeing = optimizer if isinstance(optimizer, SeesLayers) else None
    if seeing is not None:
        seeing.begin(step)
        seeing.microbatch(torch.ones(y.shape))
    optimizer.zero_grad()
    loss = _loss(model, x, y)
    loss.backward()
    if seeing is not None:
        seeing.agree(scale=1 / y.numel(), terms=y.numel())
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return bool(torch.isfinite(loss))


class Results:
    """Trainings that were made, by kind, rate, batch, seed, purpose and share; others are made in `seconds`."""

    def __init__(self, path: Path, task: Task, *, seconds: float) -> None:
        self.task, self._path, self._until = task, path, time.monotonic() + seconds
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {tuple(entry["of"]): entry["score"] for entry in map(json.loads, lines)}

    def __call__(self, kind: str, lr: float, batch: int, seed: int, *, tuning: bool, share: float = 1.0) -> float:
        """Raises `TimeoutError` where the time is over."""
        of = (kind, float(f"{lr:.6g}"), batch, seed, tuning, share)
        if of not in self._known:
            if time.monotonic() > self._until:
                raise TimeoutError
            self._known[of] = score_of(self.task, kind, of[1], batch, seed, tuning=tuning, share=share)
            with self._path.open("a") as file:
                file.write(json.dumps({"of": of, "score": self._known[of]}) + "\n")
        return self._known[of]

    def best_rate(self, kind: str, batch: int) -> float:
        """By validation; the grid goes on beyond its end for as long as the end is best."""
        tried = {power: self._tried(kind, batch, power) for power in (-1, 0, 1)}
        while (best := max(tried, key=tried.__getitem__)) in (min(tried), max(tried)):
            beyond = best + (1 if best == max(tried) else -1)
            if abs(beyond) > 6:
                break
            tried[beyond] = self._tried(kind, batch, beyond)
        return self.task.kinds[kind][1] * STEP**best

    def _tried(self, kind: str, batch: int, power: int) -> float:
        lr = self.task.kinds[kind][1] * STEP**power
        return self.task.sign * self(kind, lr, batch, TUNING_SEED, tuning=True)


def large_batch(
    task: Annotated[str, typer.Option(help="digits or text.")] = "digits",
    results: Annotated[Path | None, typer.Option(help="Where trainings are kept; default: TASK.jsonl.")] = None,
    minutes: Annotated[float, typer.Option(help="How long to train now.", min=0)] = 60.0,
    as_json: AsJson = False,
) -> None:
    """The score on held-out samples by optimizer and batch, at equal samples.

    Example: python -m benchmarks.large_batch --task text --minutes 5
    """
    trained = Results(results or Path(f"{task}.jsonl"), TASKS[task](), seconds=60 * minutes)
    print_report("large_batch", _report(trained), as_json=as_json)


def _report(trained: Results) -> Result:
    rows: list[dict[str, Any]] = []
    try:
        for name in NAMES:
            rows += [_row(trained, name, batch) for batch in trained.task.batches]
        if isinstance(trained.task, Text):
            rows += [
                _row(trained, name, batch, share=SHARE) for name in SHORTENED for batch in trained.task.batches[1:3]
            ]
    except TimeoutError:
        print(f"not finished after {len(rows)} rows: the same command goes on from there")
    return {"rows": rows, "checks": _checks(trained.task, rows)}


def _row(trained: Results, name: str, batch: int, *, share: float = 1.0) -> dict[str, Any]:
    (kind, power), batches = SCALED.get(name, (name, 0.0)), trained.task.batches
    lr = trained.best_rate(kind, batches[0] if power else batch) * (batch / batches[0]) ** power
    found = [trained(kind, lr, batch, seed, tuning=False, share=share) for seed in SEEDS]
    return {
        "optimizer": name,
        "batch": batch,
        "share": share,
        "lr": float(f"{lr:.3g}"),
        "score": round(sum(found) / len(found), 3),
        "half_interval": round(interval(found) or 0.0, 3),
    }


def _checks(task: Task, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """16 times the batch beside once; and three quarters of AdamW's samples."""
    at = {(row["optimizer"], row["batch"], row["share"]): row["score"] for row in rows}
    (unit, most), (once, four, sixteen, _), found = task.allowed, task.batches, []
    for name in NAMES:
        if (name, sixteen, 1.0) in at:
            fall = task.lost(at[name, once, 1.0], at[name, sixteen, 1.0])
            found.append(check(f"{name}: {unit} lost at 16 times the batch", fall, most, at_most=True))
    for name, batch in ((name, batch) for name in SHORTENED[1:] for batch in (four, sixteen)):
        if (name, batch, SHARE) in at:
            beside = task.lost(at["adamw", batch, 1.0], at[name, batch, SHARE])
            found.append(
                check(f"{name}, {SHARE:g} of AdamW's steps of {batch}: {unit} lost", beside, 0.0, at_most=True)
            )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(large_batch)
