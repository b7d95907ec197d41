"""`shoal compress`: a trained run, pruned or rounded and trained on in a run of its own, beside what it was.

    --to 0.1            a tenth of the weights, the largest; density falls over the first half of the steps
    --to 2:4            two of every four neighbours
    --to features:0.5   half of the hidden features, which are then taken out; as well heads:0.5
    --to experts:0.5    half of the experts, which are taken out first
    --to rows:0.5       half of the rows, which are masked alone; as well columns, block
    --to int8           weights that bear being rounded to 8 (4, 2) bits

It is `shoal train` with keys that anyone can give; what this adds is their choice, both evaluations, and the bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.assembly.shrinking import Smaller, shrink
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.load import read_all
from shoal.checkpoint.weights import weights_of
from shoal.errors import EnvironmentFault, Stopped, UsageError
from shoal.experiments.diff import provenance_of
from shoal.launcher.children import wait_for
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.sparsity.training import MASK

SHARE_OF_STEPS, LOWER_RATE = 4, 10
"""A quarter of the run's steps at a tenth of its rate, unless keys say otherwise (Han et al., arXiv:1506.02626, 3.3:
fine-tuning at a hundredth to a tenth of the rate)."""
CHANGES = 20
"""How often masks change until half of the steps are done."""
_PATTERN = re.compile(r"(?P<pattern>features|heads|experts|rows|columns|block):(?P<density>0?\.\d+)|"
                      r"(?P<n>\d+):(?P<m>\d+)|int(?P<bits>\d+)|(?P<single>0?\.\d+)")  # fmt: skip


class Side(msgspec.Struct, frozen=True):
    """One of the two models: its run directory, what an evaluation measures, weights that are not zero, and the bytes
    of a file that holds those alone; `flops` are those of the matrix products of a forward of one sample."""

    directory: str
    evaluation: dict[str, float]
    weights: int
    bytes: int
    flops: float


class Compressed(msgspec.Struct, frozen=True):
    """`after` beside `before`. `smaller` is the run directory of the model without what was taken out in the end, which
    is what `after` measures then.
    """

    to: str
    steps: int
    before: Side
    after: Side
    smaller: str | None = None


def compress(source: Path, to: str, directory: Path, overrides: Sequence[str] = ()) -> Compressed:
    """Trains the run of `source` on as `to` says, in `directory`; started again, it goes on there.

    Raises `UsageError` for a `to` or a run that cannot be, `ConfigError` for keys, `Stopped` at Ctrl-C,
    `EnvironmentFault` where the training ends with an error.
    """
    run_directory, checkpoint = source.resolve(), checkpoint_in(source)
    record = provenance_of(run_directory)
    before = load_run(run_directory / "run.toml")
    start, fewer = checkpoint, []
    if to.startswith("experts:"):
        start = directory.with_name(f"{directory.name}-start").resolve()
        fewer = [f"model.{key}={json.dumps(value)}" for key, value in _anew(checkpoint, start, to).changed.items()]
    elif to.startswith(("features:", "heads:")):
        with TemporaryDirectory(prefix="shoal-") as folder:  # what cannot be taken out is told before it is trained
            shrink(checkpoint, Path(folder), to)
    keys = [*keys_of(to, before), *fewer, f"run.warm_start={json.dumps(str(start.resolve()))}",
            f"run.name={json.dumps(f'{before.run.name}-{folder_name(to)}')}", *overrides]  # fmt: skip
    keys.append(f"run.directory={json.dumps(str(directory.resolve()))}")
    after = load_run(run_directory / "run.toml", keys)
    if (directory / "run.toml").exists() and load_run(directory / "run.toml") != after:
        raise UsageError(f"{directory} was compressed in another way: remove it, or name another with --directory")
    _run(["train", str(run_directory / "run.toml"), *keys], record["directory"], said_in=directory)
    smaller = None
    if after.sparsity is not None and after.sparsity.removes:
        smaller = directory.with_name(f"{directory.name}-smaller").resolve()
        if not (smaller / "run.toml").exists():
            _anew(directory, smaller)
    return Compressed(
        to,
        after.run.steps,
        _side(run_directory, before, record["directory"]),
        _side(smaller or directory.resolve(), after, record["directory"]),
        None if smaller is None else str(smaller),
    )


def _anew(source: Path, smaller: Path, to: str | None = None) -> Smaller:
    """`shrink`, whatever an interrupted call has left there."""
    shutil.rmtree(smaller, ignore_errors=True)
    return shrink(source, smaller, to)


def folder_name(to: str) -> str:
    """`to` as a part of a name."""
    return to.replace(":", "-")


def keys_of(to: str, run_file: RunFile) -> list[str]:
    """The keys that `to` stands for. Raises `UsageError` for what is none of its forms."""
    found = _PATTERN.fullmatch(to)
    if found is None:
        raise UsageError(
            f"--to {to}: give a density (0.1), N:M (2:4), heads:0.5, features, experts, rows, columns or block, or int8"
        )
    if run_file.sparsity is not None or run_file.quantisation is not None:
        raise UsageError("the run has [sparsity] or [quantisation] already: compress the run that it came from")
    steps = max(2, run_file.run.steps // SHARE_OF_STEPS)
    warmup = min(run_file.schedule.warmup_steps, steps // 10)
    rate = run_file.optimizer.lr / LOWER_RATE
    keys = [f"run.steps={steps}", f"optimizer.lr={rate!r}", f"schedule.warmup_steps={warmup}"]
    if found["bits"]:
        return [*keys, f"quantisation.bits={found['bits']}"]
    if found["pattern"] == "experts":
        return keys
    end = max(1, steps // 2)
    keys += [
        'sparsity.kind="magnitude"',
        f"sparsity.schedule.end={end}",
        f"sparsity.schedule.every={-(-end // CHANGES)}",
    ]
    if found["n"]:
        return [*keys, f'sparsity.pattern="{to}"']
    pattern = f'sparsity.pattern="{found["pattern"] or "unstructured"}"'
    return [*keys, pattern, f"sparsity.density={float(found['density'] or found['single'])}"]


def sentences(found: Compressed) -> list[str]:
    """A line a figure, before and after."""
    names = [name for name in found.before.evaluation if name != "step" and name in found.after.evaluation]
    rows = [(name, f"{found.before.evaluation[name]:.6g}", f"{found.after.evaluation[name]:.6g}") for name in names]
    rows.append(("FLOPs of a sample", f"{found.before.flops:.4g}", f"{found.after.flops:.4g}"))
    rows.append(("weights", f"{found.before.weights:,}", f"{found.after.weights:,}"))
    rows.append(("bytes", f"{found.before.bytes:,}", f"{found.after.bytes:,}"))
    widths = [max(len(row[place]) for row in [*rows, ("", "before", "after")]) for place in range(3)]
    lines = [f"{name:<{widths[0]}}  {one:>{widths[1]}}  {other:>{widths[2]}}"
             for name, one, other in [("", "before", "after"), *rows]]  # fmt: skip
    if found.smaller is not None:
        lines.append(f"{found.smaller} is the model without the {found.to.partition(':')[0]} that were taken out")
    elif found.to.startswith("int"):
        lines.append("bytes are those of packed integers and their scales; products stay those of floating numbers")
    elif not found.to.startswith("experts"):
        lines.append("bytes are those of the weights that are not zero and a bit for each; products stay dense")
    return lines


def _side(directory: Path, run_file: RunFile, started_in: str) -> Side:
    checkpoint = checkpoint_in(directory)
    weights, quantisation = weights_of(checkpoint), run_file.quantisation
    stored = weights if quantisation is None else _integers(directory, started_in)
    masked = {name.removeprefix(MASK) for name in read_all(read_manifest(checkpoint), checkpoint.parents[1], MASK)}
    kept = {name: int(tensor.count_nonzero()) for name, tensor in weights.items()}
    size = 0
    for name, tensor in stored.items():
        if name in masked:
            size += kept[name] * tensor.element_size() + -(-tensor.numel() // 8)
        elif quantisation is not None and tensor.dtype == torch.int8:
            size += -(-tensor.numel() * quantisation.bits // 8)
        else:
            size += tensor.numel() * tensor.element_size()
    said = json.loads(_run(["evaluate", str(directory), "--flops", "--json"], started_in))
    return Side(str(directory), said, sum(kept.values()), size, said.pop("flops"))


def _integers(directory: Path, started_in: str) -> dict[str, Tensor]:
    """The weights of a run with `[quantisation]` as they are deployed."""
    with TemporaryDirectory(prefix="shoal-") as folder:
        file = f"{folder}/integers.safetensors"
        _run(["checkpoint", "export", str(directory), file, "--integers"], started_in)
        return load_file(file)


def _run(arguments: Sequence[str], started_in: str, *, said_in: Path | None = None) -> str:
    """`shoal ...` where the run was started; what it prints, which for a training is shown instead."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        cwd=started_in,
        env=dict(os.environ),
        stdout=sys.stderr if said_in else subprocess.PIPE,
        text=True,
    )
    try:
        said = "" if process.stdout is None else process.stdout.read()
        code = wait_for(process)
    except KeyboardInterrupt:
        raise Stopped("interrupted: the same command goes on from there") from None
    if code != 0:
        raise EnvironmentFault(f"shoal {arguments[0]} ended with exit code {code}; its own sentence is above")
    return said
