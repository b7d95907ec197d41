"""`python -m benchmarks.budget_sweep`: `memory.budget` at shares of the plain peak, on five models.

The plain peak is that of the first steps on a simulated device that refuses nothing. At each share of it, the planner
chooses a mixture or refuses. A choice is run, held to the budget: its peak and its losses are compared with those of
the plain run, to the bit. A refusal says what the least is: a budget 5 % above has to be met, and one 5 % below not.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from torch import Tensor, nn

from benchmarks.command import run
from shoal import units
from shoal.assembly.start import RANK
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.report import Check, Result, Row, check, print_report
from shoal.errors import LayoutError
from shoal.launcher import warm
from shoal.planning.memory_budget import BOUNDLESS, first_steps, with_budget
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

CASES: dict[str, tuple[str, list[str]]] = {
    "gpt": ("stdlib-gpt", ["batch.global_samples=8"]),
    "llama": ("lora-base", ["batch.global_samples=8"]),
    "resnet": ("resnet", ["model.build=benchmarks.budget_sweep:resnet"]),
    "mixture": ("stdlib-moe", ["batch.global_samples=8", "layout.shard=1", "layout.expert=1"]),
    "encoder": ("encoder", ["model.arguments={width=128,depth=4,heads=4}"]),
}
COMMON = ["run.processes=1", "run.device=cpu"]
STEPS = 3
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
    as_json: AsJson = False,
) -> None:
    """What `memory.budget` chooses at shares of the plain peak, and whether that is right.

    Example: python -m benchmarks.budget_sweep --models gpt --shares 50
    """
    os.environ |= warm.preload(RANK, os.environ)  # trials are forks
    rows: list[Row] = []
    checks: list[Check] = []
    for model in names(models, "--models", CASES):
        folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))  # not one that ends with the first fork that does
        try:
            found = measure(folder, model, numbers(shares, "--shares", most=100))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows += found["rows"]
        checks += found["checks"]
    print_report("budget_sweep", {"rows": rows, "checks": checks}, as_json=as_json)


def measure(folder: Path, model: str, shares: Sequence[int]) -> Result:
    """A row for each share."""
    recipe, overrides = CASES[model]

    def opened(*keys: str) -> RunFile:
        return load_run(Path(f"recipes/{recipe}.toml"), [*COMMON, *overrides, f"run.directory={folder / 'run'}", *keys])

    file = opened()
    plain_bytes, plain_losses = _ran(_with(file, simulate_device=BOUNDLESS), folder / "plain")
    rows: list[Row] = []
    checks: list[Check] = []
    for share in shares:
        budget = plain_bytes * share // 100
        begin_s = time.perf_counter()
        row: Row = {"model": model, "share": share, "budget_bytes": budget}
        try:
            chosen, said = with_budget(_with(file, budget=f"{budget} B"), None)
        except LayoutError as refused:
            row |= {"found": f"refused: {refused}"} | _refusal(opened, str(refused))
            checks.append(
                check(f"{model}, {share} %: the least of the refusal is right", float(bool(row["right"])), 1.0)
            )
        else:
            peak, losses = _ran(chosen, folder / f"chosen-{share}")
            row |= {"found": said.split(": ", 1)[1], "peak_bytes": peak, "losses_differ": losses != plain_losses}
            checks.append(check(f"{model}, {share} %: peak of the budget", peak / budget, 1.0, at_most=True))
            checks.append(check(f"{model}, {share} %: losses differ", float(losses != plain_losses), 0.0, at_most=True))
        rows.append(row | {"seconds": round(time.perf_counter() - begin_s, 1)})
        print(f"{model}, {share} %: {row['found']}", file=sys.stderr, flush=True)
    return {"rows": rows, "checks": checks}


def _refusal(opened: Callable[..., RunFile], said: str) -> Row:
    """Whether the mixture that the refusal names meets a budget 5 % above the least, and not one 5 % below."""
    match = _LEAST.search(said)
    if match is None:
        return {"right": False}
    least, keys = units.memory_bytes(match[1]), [key.replace(" ", "") for key in match[2].split(" and ")]
    above, below = (opened(*keys, f"memory.budget={least * part // 100} B") for part in (105, 95))
    return {"least_bytes": least, "right": _is_met(above) and not _is_met(below)}


def _is_met(file: RunFile) -> bool:
    try:
        with_budget(file, None)
    except LayoutError:
        return False
    return True


def _with(file: RunFile, **memory: str) -> RunFile:
    return msgspec.structs.replace(file, memory=msgspec.structs.replace(file.memory, **memory))


def _ran(file: RunFile, folder: Path) -> tuple[int, list[float]]:
    """The peak and the losses of some steps."""
    folder.mkdir()
    found = first_steps(file, folder, steps=STEPS)
    if isinstance(found, str):
        raise LayoutError(f"a run that was chosen did not run: {found}")
    return found.peak_bytes, found.losses


if __name__ == "__main__":
    run(budget_sweep)
