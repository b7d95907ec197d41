"""`shoal checkpoint ls|verify|diff|export|import`: reads checkpoints without a job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from shoal.cli.arguments import AsJson, output_file, output_folder
from shoal.errors import UsageError
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.inspect import Difference

app = typer.Typer(help="Reads checkpoints without a job.", no_args_is_help=True, rich_markup_mode=None)

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
Source = Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run directory, or a checkpoint in it.")]


@app.command("ls")
def ls(directory: RunDirectory, as_json: AsJson = False) -> None:
    """Lists the checkpoints of a run, newest first. The best one, if checkpoint.keep_best keeps it, is also called
    RUN_DIR/checkpoints/best, for export, evaluate and run.warm_start.

    Example: shoal checkpoint ls runs/stdlib-gpt
    """
    from shoal.checkpoint.objects import require_folder

    require_folder(directory)  # before what follows imports torch, here and below
    from shoal.checkpoint.inspect import listing

    with busy(f"reading the manifests of {directory}"):
        rows = [msgspec.to_builtins(row) for row in listing(directory)]
    if as_json:
        answer(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        size = f"{row['tensors'] or 0} tensors, {row['nbytes'] or 0:,} bytes"
        print(f"step {row['step']:>8}  {_when(row)}  {size}  {_state(row)}{'  best' if row['best'] else ''}")
    if not rows:
        print(f"{directory} holds no checkpoint")


def _when(row: dict[str, Any]) -> str:
    if row["created"] is None:
        return "unreadable"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"]))


def _state(row: dict[str, Any]) -> str:
    if not row["verified"]:
        return "DAMAGED: 'shoal checkpoint verify' says where"
    return "whole" if row["protected"] else "whole, manifest of an earlier version: not protected by a hash"


@app.command("verify")
def verify(
    directory: RunDirectory,
    step: Annotated[int | None, typer.Option(help="Only the checkpoint of this step; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Reads every byte of the checkpoints again and compares hashes; exit 6 where one is not what was written.

    Also names, without failing, checkpoints of earlier versions, whose manifests have no hash of their own.

    Example: shoal checkpoint verify runs/stdlib-gpt
    """
    from shoal.checkpoint.objects import require_checkpoints

    require_checkpoints(directory)
    from shoal.checkpoint.inspect import unprotected_notes
    from shoal.checkpoint.inspect import verify as examine

    with busy(f"reading the checkpoints of {directory}"):
        found = [msgspec.to_builtins(finding) for finding in examine(directory, step)]
        notes = unprotected_notes(directory, step)
    if as_json:
        answer(json.dumps({"findings": found, "notes": notes}))
    else:
        said = [finding["sentence"] for finding in found] or [f"{directory}: every checkpoint is whole"]
        print("\n".join([*said, *notes]))
    raise typer.Exit(6 if found else 0)


@app.command("diff")
def diff(first: Source, second: Source, as_json: AsJson = False) -> None:
    """Compares two checkpoints tensor by tensor, whatever layouts wrote them; exit 6 where they differ.

    Example: shoal checkpoint diff runs/a runs/b/checkpoints/step-00000100
    """
    from shoal.checkpoint.objects import require_checkpoint

    for source in (first, second):
        require_checkpoint(source)
    from shoal.checkpoint.inspect import compare

    with busy("comparing tensors"):
        found = compare(first, second)
    if as_json:
        answer(msgspec.json.encode(found).decode())
    else:
        print(f"step {found.first_step} and step {found.second_step}: {found.same} tensors are the same, "
              f"{len(found.differences)} are not")  # fmt: skip
        for difference in found.differences:
            print(_line(difference))
    raise typer.Exit(6 if found.differences else 0)


def _line(difference: Difference) -> str:
    """`difference` in words: what differs, of which type and shape, and the largest difference of numbers."""
    there = " and ".join(dict.fromkeys(said for said in (difference.first, difference.second) if said is not None))
    if difference.kind not in ("values", "type"):
        return f"  {difference.name}: {difference.kind} ({there})"
    size = "not all finite" if difference.max_abs is None else f"by at most {difference.max_abs:.6g}"
    return f"  {difference.name} ({there}): other {difference.kind}, {size}"


@app.command("export")
def export(
    source: Source,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file, or the folder, to write.")],
    to: Annotated[
        Literal["safetensors", "huggingface"],
        typer.Option(help='One file, or a folder for from_pretrained (of a model of kind "transformers").'),
    ] = "safetensors",
    integers: Annotated[
        bool, typer.Option("--integers", help="Of a run with [quantisation]: int8 weights and their scales.")
    ] = False,
    dtype: Annotated[
        Literal["saved", "float32", "bfloat16"], typer.Option(help="In which to write them; saved: as they are.")
    ] = "saved",
    as_json: AsJson = False,
) -> None:
    """Writes the weights of the unsplit model, whatever layout trained it, to one safetensors file.

    Adapters of [adapter] are merged into the weights that they belong to, but for bottlenecks and prompts.

    With --to huggingface: to a folder that transformers' from_pretrained loads; of a run with adapters, the adapters.

    Example: shoal checkpoint export runs/stdlib-gpt weights.safetensors
    """
    from shoal.checkpoint.objects import require_checkpoint

    if integers and dtype != "saved":
        raise UsageError(f"--integers with --dtype {dtype}: integers have scales in float32; leave one of the two out")
    if integers and to == "huggingface":
        raise UsageError("--integers with --to huggingface, whose classes have no places for scales; leave one out")
    if to == "safetensors":
        output_file(file)
    require_checkpoint(source)
    from shoal.checkpoint.weights import export as write
    from shoal.checkpoint.weights import in_dtype

    with busy(f"writing {file}"):
        made = _integers(source) if integers else _merge(source)
        if to == "safetensors":
            step = write(source, file, change=lambda weights: in_dtype(made(weights), dtype))
        else:
            step = _export_folder(source, file, dtype, made)
    answer(json.dumps({"step": step, "file": str(file)}) if as_json else f"{file}: the weights of step {step}")


def _integers(source: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """What puts integers in the place of the weights that a run rounds."""
    from shoal.assembly.shrinking import as_integers
    from shoal.checkpoint.commit import checkpoint_in, run_directory_of
    from shoal.runfile.load import load_run

    written = run_directory_of(checkpoint_in(source)) / "run.toml"
    return partial(as_integers, run_file=load_run(written))


def _merge(source: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """What puts adapters into the weights that they belong to, where the run has a table [adapter]."""
    from shoal.checkpoint.commit import checkpoint_in, run_directory_of
    from shoal.models.adapters import merged
    from shoal.runfile.load import load_run

    written = run_directory_of(checkpoint_in(source)) / "run.toml"
    adapter = load_run(written).adapter if written.exists() else None
    return dict if adapter is None else partial(merged, config=adapter)


def _export_folder(
    source: Path, folder: Path, dtype: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> int:
    from shoal.checkpoint.commit import checkpoint_in, run_directory_of
    from shoal.checkpoint.huggingface import export_folder
    from shoal.config.load import read
    from shoal.models.config import Bottleneck, ModelConfig, PromptTuning
    from shoal.models.huggingface.config import TransformersConfig
    from shoal.runfile.load import load_run

    directory = run_directory_of(checkpoint_in(source))
    written, shrunk = directory / "run.toml", directory / "model.toml"
    if shrunk.exists() and not written.exists():
        written, model = shrunk, msgspec.convert(read(shrunk)["model"], ModelConfig)
    else:
        run_file = load_run(written)
        model, adapter = run_file.model, run_file.adapter
        if isinstance(adapter, Bottleneck | PromptTuning):
            raise UsageError(
                f'{written} trains adapter.kind = "{adapter.variant}", which cannot be merged into weights that '
                "transformers knows: leave out --to huggingface"
            )
    if not isinstance(model, TransformersConfig):
        kind = model.variant
        raise UsageError(
            f'{written} trains model.kind = "{kind}", which transformers does not know: leave out --to huggingface'
        )
    return export_folder(source, folder, model, dtype=dtype, change=change)


@app.command("shrink")
def shrink(
    source: Source,
    directory: Annotated[
        Path, typer.Argument(metavar="NEW_RUN_DIR", help="A new folder for the smaller model.", callback=output_folder)
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="Take out the smallest features, heads or experts, and keep this share of each block's: heads:0.5."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Takes hidden features or heads that a run has masked out of its model, for run.warm_start; or as --to says.

    Example: shoal checkpoint shrink runs/pruned runs/smaller
    """
    from shoal.checkpoint.objects import require_checkpoint

    require_checkpoint(source)
    from shoal.assembly.shrinking import sentence
    from shoal.assembly.shrinking import shrink as take_out

    with busy(f"writing a checkpoint to {directory}"):
        smaller = take_out(source, directory, to)
    figures = {smaller.what: smaller.left, "model": smaller.changed, "directory": str(directory)}
    answer(json.dumps(figures) if as_json else sentence(smaller, directory))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file by the model's names, or a folder.")],
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="A new folder for the checkpoint.", callback=output_folder)
    ],
    as_json: AsJson = False,
) -> None:
    """Makes the weights in a safetensors file a checkpoint, for run.warm_start in any layout.

    A folder is one of transformers', with config.json and safetensors files.

    Example: shoal checkpoint import weights.safetensors imported
    """
    if file.is_dir():
        from shoal.models.huggingface.config import CONFIG_FILE

        if not (file / CONFIG_FILE).is_file():
            raise UsageError(f"{file} holds no {CONFIG_FILE}: give a folder that save_pretrained of transformers wrote")
        from shoal.checkpoint.huggingface import import_folder as read
    else:
        from shoal.checkpoint.objects import require_weights

        require_weights(file)
        from shoal.checkpoint.weights import import_weights as read

    with busy(f"writing a checkpoint to {directory}"):
        folder = read(file, directory)
    answer(json.dumps({"checkpoint": str(folder)}) if as_json else f"{folder}: start from it with run.warm_start")
