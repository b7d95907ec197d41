"""`python -m benchmarks.budget_sweep`: `memory.budget` at shares of the plain peak, on five models and 1 and 2 ranks.

The plain peak is that of the first steps on a simulated device that refuses nothing. At each share of it, the planner
chooses a mixture or refuses. A choice is run, held to the budget: its peak and its losses are compared with those of
the plain run, to the bit where the mixture changes nothing, else to a tolerance. A refusal says what the least is: a
budget 5 % above has to be met, and one 5 % below not. Of the mixture that is used, the peak and the step that were
predicted stand beside those of its trial. With `--results` a file has what was found, a line for each trial and row,
and what it has is not tried again; with `--limit-s` a call ends behind the row in which so many seconds are over. A
part of the state has the same size under all budgets, so that a mixture is tried once for all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from blake3 import blake3
from torch import Tensor, nn

from benchmarks.command import run
from shoal import units
from shoal.assembly.start import RANK
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.report import Check, Row, check, print_report
from shoal.config.load import dumps
from shoal.errors import LayoutError
from shoal.launcher import warm
from shoal.observe.events import read_events
from shoal.planning.memory_budget import FILE_NAME, Bill, with_budget
from shoal.planning.mixture_search import ROUNDING
from shoal.planning.mixtures import AS_IT_IS, BOUNDLESS
from shoal.planning.trial import FirstSteps, first_steps, trial_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

CASES: dict[str, tuple[str, list[str]]] = {
    "gpt": ("stdlib-gpt", ["batch.global_samples=8"]),
    "llama": ("lora-base", ["batch.global_samples=8"]),
    "resnet": ("resnet", ["model.build=benchmarks.budget_sweep:resnet"]),
    "mixture": ("stdlib-moe", ["batch.global_samples=8", "layout.shard=1", "layout.expert=1"]),
    "encoder": ("encoder", ["model.arguments={width=128,depth=4,heads=4}"]),
}
ACROSS = {"resnet": ["model.batch_norm=synchronised"]}
"""Keys of a model that is on several ranks."""
COMMON = ["run.device=cpu", "memory.offload.part=256KiB"]
STEPS = 3
LOOKS = "torch._dynamo"
"""What PyTorch imports when a ledger first looks at an operator."""
_LEAST = re.compile(r"the least that is met is ([0-9.]+ [KMGi]*B), with (.*?); raise it")


class _Net(nn.Module):
    """transformers' ResNet, from grey images `[batch, 1, 8, 8]` to logits `[batch, classes]`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=images.expand(-1, 3, -1, -1)).logits


def resnet(classes: int = 10) -> nn.Module:
    """A small one, whose batch normalisation uses each microbatch's statistics."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic")
    config.num_labels = classes
    return _Net(ResNetForImageClassification(config))


def budget_sweep(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}; default: all.")] = "",
    ranks: Annotated[str, typer.Option(help="Processes of a run.")] = "1,2",
    shares: Annotated[str, typer.Option(help="Of the plain peak, in per cent.")] = "100,75,50,35,25",
    keys: Annotated[
        str, typer.Option(help="More keys of the run file, such as memory.budget_may_change=moments.")
    ] = "",
    limit_s: Annotated[float, typer.Option(help="Seconds after which no row is begun; 0: none.")] = 0.0,
    results: Annotated[Path | None, typer.Option(help="File of what was found, which is not run again.")] = None,
    as_json: AsJson = False,
) -> None:
    """What `memory.budget` chooses at shares of the plain peak, and whether that is right.

    Example: python -m benchmarks.budget_sweep --models gpt --shares 50
    """
    os.environ |= warm.preload([*RANK, LOOKS], os.environ)  # trials are forks
    kept, begin_s = _kept(results), time.perf_counter()
    cells = [(model, number) for model in names(models, "--models", CASES) for number in numbers(ranks, "--ranks")]
    for model, number in cells:
        folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))  # not one that ends with the first fork that does
        case = Case(model, number, tuple(keys.split()), folder)
        try:
            for share in numbers(shares, "--shares", most=100):
                if not limit_s or time.perf_counter() - begin_s < limit_s:
                    measure(case, share, kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    rows = list(kept.rows.values())
    print_report(
        "budget_sweep", {"rows": rows, "checks": [one for row in rows for one in _checks(row)]}, as_json=as_json
    )


@dataclass(frozen=True)
class Case:
    """A model on some ranks, with more `keys`; what it needs of a disk is in `folder`."""

    model: str
    ranks: int
    keys: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        """In files and for people."""
        return " ".join([self.model, f"x{self.ranks}", *self.keys])

    def opened(self, *keys: str) -> RunFile:
        """Its run file, with still more keys."""
        recipe, overrides = CASES[self.model]
        own = [f"run.processes={self.ranks}", f"run.directory={self.folder / 'run'}"]
        own += ACROSS.get(self.model, []) if self.ranks > 1 else []
        return load_run(Path(f"recipes/{recipe}.toml"), [*COMMON, *overrides, *own, *self.keys, *keys])


class Plain(msgspec.Struct, frozen=True):
    """The first steps of a case with nothing in the way."""

    case: str
    peak_bytes: int
    losses: list[float]


class Tried(msgspec.Struct, frozen=True):
    """The first steps of a run file, but for where it runs; None: it did not run, for `why`."""

    digest: str
    steps: FirstSteps | None
    why: str = ""


@dataclass
class Kept:
    """What was found so far, and the file that has it."""

    path: Path | None
    plain: dict[str, Plain] = field(default_factory=dict)
    trials: dict[str, Tried] = field(default_factory=dict)
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def add(self, found: Plain | Tried | Row) -> None:
        """Keeps it, and writes it down."""
        if isinstance(found, Plain):
            self.plain[found.case] = found
        elif isinstance(found, Tried):
            self.trials[found.digest] = found
        else:
            self.rows[str(found["case"]), int(found["share"] or 0)] = found
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")

    def trial(self, file: RunFile) -> FirstSteps | str:
        """A run file's first steps, which are taken once."""
        nowhere = msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, directory=None))
        digest = blake3(dumps(nowhere).encode()).hexdigest()
        if digest not in self.trials:
            steps = trial_of(file)
            self.add(Tried(digest, None, steps) if isinstance(steps, str) else Tried(digest, steps))
        known = self.trials[digest]
        return known.why if known.steps is None else known.steps


def _kept(path: Path | None) -> Kept:
    kept = Kept(None)
    for line in path.read_bytes().splitlines() if path is not None and path.exists() else ():
        found = msgspec.json.decode(line)
        kind = next((kind for key, kind in (("losses", Plain), ("digest", Tried)) if key in found), None)
        kept.add(found if kind is None else msgspec.convert(found, kind))
    kept.path = path
    return kept


def measure(case: Case, share: int, kept: Kept) -> None:
    """The row of a share, if there is none."""
    if case.name not in kept.plain:
        found, _ = _ran(_with(case.opened(), simulate_device=BOUNDLESS), case.folder / "plain")
        kept.add(Plain(case.name, found.peak_bytes, found.losses))
    if (case.name, share) in kept.rows:
        return
    begin_s = time.perf_counter()
    row = _row(case, share, kept)
    kept.add(row | {"seconds": round(time.perf_counter() - begin_s, 1), "load": round(os.getloadavg()[0], 1)})
    print(f"{case.name}, {share} %: {row['found']}", file=sys.stderr, flush=True)


def _row(case: Case, share: int, kept: Kept) -> Row:
    """What the budget came to; of a refusal, whether the mixture that it names meets 5 % above the least, and not 5 %
    below.
    """
    plain = kept.plain[case.name]
    budget = plain.peak_bytes * share // 100
    row: Row = {"case": case.name, "share": share, "budget_bytes": budget}
    file = _with(case.opened(), budget=f"{budget} B")
    try:
        chosen, _ = with_budget(file, None, trial=kept.trial)
    except LayoutError as refused:
        match = _LEAST.search(str(refused))
        if match is None:
            return row | {"found": f"refused: {refused}", "right": False}
        least, keys = units.memory_bytes(match[1]), [key.replace(" ", "") for key in match[2].split(" and ")]
        keys = [] if match[2] == AS_IT_IS.said else keys
        above, below = (case.opened(*keys, f"memory.budget={least * part // 100} B") for part in (105, 95))
        right = _is_met(above, kept) and not _is_met(below, kept)
        return row | {"found": f"refused: {match[2]}", "least_bytes": least, "right": right}
    bill = msgspec.json.decode((case.folder / "run" / FILE_NAME).read_bytes(), type=Bill)
    used, first = bill.tried[-1], bill.tried[0]
    ran, peak_bytes = _ran(chosen, case.folder / f"chosen-{share}")
    off = max(abs(a / b - 1) for a, b in zip(ran.losses, plain.losses, strict=True))
    return row | {
        "found": used.keys,
        "tried": len(bill.tried),
        "change": used.change,
        "peak_bytes": peak_bytes,
        "losses_off": off,
        "predicted_peak": used.predicted_bytes and round(used.predicted_bytes / (used.peak_bytes or 1), 3),
        "predicted_step": used.longer is not None and round(1 + used.longer, 3),
        "measured_step": round((used.step_s or 0) / (first.step_s or 1), 3),
    }


def _checks(row: Row) -> Iterator[Check]:
    name = f"{row['case']}, {row['share']} %"
    if "right" in row:
        yield check(f"{name}: the least of the refusal is right", float(bool(row["right"])), 1.0)
        return
    yield check(
        f"{name}: peak of the budget", int(row["peak_bytes"] or 0) / int(row["budget_bytes"] or 1), 1.0, at_most=True
    )
    within = {"nothing": 0.0, "rounding": ROUNDING["float32"]}.get(str(row["change"]))
    if within is not None:
        yield check(f"{name}: losses are off by", float(row["losses_off"] or 0), within, at_most=True)


def _is_met(file: RunFile, kept: Kept) -> bool:
    try:
        with_budget(file, None, trial=kept.trial)
    except LayoutError:
        return False
    return True


def _with(file: RunFile, **memory: str) -> RunFile:
    return msgspec.structs.replace(file, memory=msgspec.structs.replace(file.memory, **memory))


def _ran(file: RunFile, folder: Path) -> tuple[FirstSteps, int]:
    """The first steps of a run, and the most that a rank held in one of them, in bytes."""
    folder.mkdir()
    found = first_steps(file, folder, steps=STEPS)
    if isinstance(found, str):
        raise LayoutError(f"a run that was chosen did not run: {found}")
    events = [event for rank in range(file.run.processes or 1) for event in read_events(folder / "run", rank=rank)]
    return found, int(max(event.get("memory/device_peak_bytes") or 0 for event in events))


if __name__ == "__main__":
    run(budget_sweep)
