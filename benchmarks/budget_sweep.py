"""`python -m benchmarks.budget_sweep`: `memory.budget` at shares of the plain peak, on five models.

The plain peak is that of the first steps on a simulated device that refuses nothing. At each share of it, the planner
chooses a mixture or refuses. A choice is run, held to the budget: its peak and its losses are compared with those of
the plain run, to the bit. A refusal says what the least is: a budget 5 % above has to be met, and one 5 % below not.
With `--results` a file has what was found, a line for each trial and row, and what it has is not tried again. A part of
the state has the same size under all budgets, so that a mixture is tried once for all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from shoal.planning.memory_budget import BOUNDLESS, FirstSteps, first_steps, peak_of, with_budget
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

CASES: dict[str, tuple[str, list[str]]] = {
    "gpt": ("stdlib-gpt", ["batch.global_samples=8"]),
    "llama": ("lora-base", ["batch.global_samples=8"]),
    "resnet": ("resnet", ["model.build=benchmarks.budget_sweep:resnet"]),
    "mixture": ("stdlib-moe", ["batch.global_samples=8", "layout.shard=1", "layout.expert=1"]),
    "encoder": ("encoder", ["model.arguments={width=128,depth=4,heads=4}"]),
}
COMMON = ["run.processes=1", "run.device=cpu", "memory.offload.part=256KiB"]
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
    shares: Annotated[str, typer.Option(help="Of the plain peak, in per cent.")] = "100,75,50,35",
    results: Annotated[Path | None, typer.Option(help="File of what was found, which is not run again.")] = None,
    as_json: AsJson = False,
) -> None:
    """What `memory.budget` chooses at shares of the plain peak, and whether that is right.

    Example: python -m benchmarks.budget_sweep --models gpt --shares 50
    """
    os.environ |= warm.preload([*RANK, LOOKS], os.environ)  # trials are forks
    kept = _kept(results)
    for model in names(models, "--models", CASES):
        folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))  # not one that ends with the first fork that does
        try:
            measure(folder, model, numbers(shares, "--shares", most=100), kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    rows = list(kept.rows.values())
    print_report(
        "budget_sweep", {"rows": rows, "checks": [one for row in rows for one in _checks(row)]}, as_json=as_json
    )


class Plain(msgspec.Struct, frozen=True):
    """The first steps of a model with nothing in the way."""

    model: str
    peak_bytes: int
    losses: list[float]


class Trial(msgspec.Struct, frozen=True):
    """The peak of a run file, but for where it runs; None: it did not run, for `why`."""

    digest: str
    trial_bytes: int | None
    why: str


@dataclass
class Kept:
    """What was found so far, and the file that has it."""

    path: Path | None
    plain: dict[str, Plain] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def add(self, found: Plain | Trial | Row) -> None:
        """Keeps it, and writes it down."""
        if isinstance(found, Plain):
            self.plain[found.model] = found
        elif isinstance(found, Trial):
            self.trials[found.digest] = found
        else:
            self.rows[str(found["model"]), int(found["share"] or 0)] = found
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")

    def peak(self, file: RunFile) -> tuple[int | None, str]:
        """That of a run file's first steps, which are taken once."""
        nowhere = msgspec.structs.replace(file, run=msgspec.structs.replace(file.run, directory=None))
        digest = blake3(dumps(nowhere).encode()).hexdigest()
        if digest not in self.trials:
            self.add(Trial(digest, *peak_of(file)))
        return self.trials[digest].trial_bytes, self.trials[digest].why


def _kept(path: Path | None) -> Kept:
    kept = Kept(None)
    for line in path.read_bytes().splitlines() if path is not None and path.exists() else ():
        found = msgspec.json.decode(line)
        kind = next((kind for key, kind in (("losses", Plain), ("digest", Trial)) if key in found), None)
        kept.add(found if kind is None else msgspec.convert(found, kind))
    kept.path = path
    return kept


def measure(folder: Path, model: str, shares: Sequence[int], kept: Kept) -> None:
    """A row for each share that has none."""
    recipe, overrides = CASES[model]

    def opened(*keys: str) -> RunFile:
        return load_run(Path(f"recipes/{recipe}.toml"), [*COMMON, *overrides, f"run.directory={folder / 'run'}", *keys])

    file = opened()
    if model not in kept.plain:
        found = _ran(_with(file, simulate_device=BOUNDLESS), folder / "plain")
        kept.add(Plain(model, found.peak_bytes, found.losses))
    for share in shares:
        if (model, share) not in kept.rows:
            begin_s = time.perf_counter()
            row = _row(file, opened, folder / f"chosen-{share}", share, model, kept)
            kept.add(row | {"seconds": round(time.perf_counter() - begin_s, 1)})
            print(f"{model}, {share} %: {row['found']}", file=sys.stderr, flush=True)


def _row(file: RunFile, opened: Callable[..., RunFile], folder: Path, share: int, model: str, kept: Kept) -> Row:
    """What the budget came to; of a refusal, whether the mixture that it names meets 5 % above the least, and not 5 %
    below.
    """
    plain = kept.plain[model]
    budget = plain.peak_bytes * share // 100
    row: Row = {"model": model, "share": share, "budget_bytes": budget}
    try:
        chosen, said = with_budget(_with(file, budget=f"{budget} B"), None, peak=kept.peak)
    except LayoutError as refused:
        match = _LEAST.search(str(refused))
        if match is None:
            return row | {"found": f"refused: {refused}", "right": False}
        least, keys = units.memory_bytes(match[1]), [key.replace(" ", "") for key in match[2].split(" and ")]
        above, below = (opened(*keys, f"memory.budget={least * part // 100} B") for part in (105, 95))
        right = _is_met(above, kept) and not _is_met(below, kept)
        return row | {"found": f"refused: {match[2]}", "least_bytes": least, "right": right}
    used, _, others = said.split(": ", 1)[1].partition(" (")
    ran = _ran(chosen, folder)
    return row | {
        "found": used,
        "tried": 1 + (others.count(";") + 1 if others else 0),
        "peak_bytes": ran.peak_bytes,
        "losses_differ": ran.losses != plain.losses,
    }


def _checks(row: Row) -> Iterator[Check]:
    name = f"{row['model']}, {row['share']} %"
    if "right" in row:
        yield check(f"{name}: the least of the refusal is right", float(bool(row["right"])), 1.0)
        return
    yield check(
        f"{name}: peak of the budget", int(row["peak_bytes"] or 0) / int(row["budget_bytes"] or 1), 1.0, at_most=True
    )
    yield check(f"{name}: losses differ", float(bool(row["losses_differ"])), 0.0, at_most=True)


def _is_met(file: RunFile, kept: Kept) -> bool:
    try:
        with_budget(file, None, peak=kept.peak)
    except LayoutError:
        return False
    return True


def _with(file: RunFile, **memory: str) -> RunFile:
    return msgspec.structs.replace(file, memory=msgspec.structs.replace(file.memory, **memory))


def _ran(file: RunFile, folder: Path) -> FirstSteps:
    folder.mkdir()
    found = first_steps(file, folder, steps=STEPS)
    if isinstance(found, str):
        raise LayoutError(f"a run that was chosen did not run: {found}")
    return found


if __name__ == "__main__":
    run(budget_sweep)
