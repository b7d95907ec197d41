"""What rank 0 does when training is over: text from the model, a bigram beside the loss, the speed for later plans.

Text from a byte-level language model: what a person looks at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from shoal.assembly.objects import UserObjects, model_of
from shoal.assembly.run import Run, open_run
from shoal.assembly.run_gradients import zero_of
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.load import read_into
from shoal.checkpoint.objects import Places
from shoal.engine.forward_backward import evaluating
from shoal.engine.loss import call_model, described, prediction_in
from shoal.engine.recovery import load_weights
from shoal.errors import ConfigError, CorruptCheckpoint, DataError, UsageError
from shoal.launcher.environment import Place
from shoal.launcher.signals import StopRequest
from shoal.maths.counter import key_of, uniform
from shoal.observe.facts import write_facts
from shoal.observe.prediction import Forecast
from shoal.observe.profile.first_step import flops_of
from shoal.observe.sink import Sinks
from shoal.observe.terminal import ProgressBar
from shoal.resilience.preemption import Preemption, watching_for_preemption
from shoal.runfile.run_file import RunFile, run_directory

TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(run: Run, model: nn.Module, prompt: str, count: int) -> str:
    """`count` bytes that follow `prompt`, drawn from the softmax of the logits at `TEMPERATURE`, keyed on the seed.

    `model` is the unsplit model.
    Raises `ConfigError` where the model does not give logits over bytes for a sequence of bytes.
    """
    model, device = model.eval(), run.device
    tokens = torch.tensor([list(prompt.encode())], device=device)
    draws = uniform(key_of(run.run_file.run.seed, "sample text"), torch.arange(count), dtype=torch.float64)
    for draw in draws.tolist():
        outputs = call_model(model, tokens[:, -run.run_file.batch.sequence :])
        logits = prediction_in(outputs)
        if logits is None or logits.ndim != 3 or logits.shape[-1] < 256:
            raise ConfigError(
                f"observe.sample_bytes = {count} needs a model of bytes; this one returned {described(outputs)}, "
                "not [batch, sequence, 256 or more]"
            )
        chances = torch.softmax(logits[0, -1, :256].double() / TEMPERATURE, dim=-1)
        drawn = torch.searchsorted(chances.cumsum(0), torch.tensor([draw], device=device, dtype=chances.dtype)).clamp_(
            max=255
        )
        tokens = torch.cat([tokens, drawn.view(1, 1)], dim=1)
    return bytes(tokens[0, len(prompt.encode()) :].tolist()).decode("utf-8", errors="replace")


def unsplit_model(run: Run) -> nn.Module:
    """The whole model on this rank alone, with the trained weights: from the last checkpoint where ranks split it.

    Raises `CorruptCheckpoint` where that is not whole.
    """
    if run.mesh.layout.replica_size == 1 and zero_of(run.run_file.memory, run.mesh) is None:
        return run.model
    model = model_of(run.run_file, run.workload.objects, device=run.device, dtype=run.workload.precision.parameters)
    directory = run_directory(run.run_file)
    manifest = read_manifest(checkpoint_in(Places(directory).step(run.state.progress.step)))
    saved = set(model.state_dict(keep_vars=True))
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    read_into(manifest, directory, {f"model/{name}": tensor.detach() for name, tensor in tensors.items()})
    return model


def conclude(run: Run, directory: Path, sinks: Sinks, forecast: Forecast | None) -> None:
    """On rank 0, with the run's last weights.

    `forecast`: None if this start took no steps, and so measured nothing.
    """
    observe = run.run_file.observe
    text = _sampled(run, sinks) if observe.sample_bytes else None
    if text is not None:
        write_facts(
            directory,
            {"samples": [{"step": run.run_file.run.steps, "prompt": observe.sample_prompt, "text": text}]},
        )
        sinks.note(f"the model continues {observe.sample_prompt!r}:\n{observe.sample_prompt}{text}")
    baseline = run.workload.data.facts.get("baseline/bigram_nats_per_byte")
    if baseline is not None:
        sinks.note(f"a bigram model of the same split reaches {baseline:.3f} nats/byte")
    if forecast is not None:
        forecast.remember(directory, run.process.environ)


def _sampled(run: Run, sinks: Sinks) -> str | None:
    """Text from the model; a model that gives none is no reason to end a finished run with an error."""
    observe = run.run_file.observe
    sinks.activity("writing text with the model")
    try:
        return sample_text(run, unsplit_model(run), observe.sample_prompt, observe.sample_bytes)
    except (UsageError, CorruptCheckpoint) as error:
        sinks.warn(str(error))
        return None


# A host that is about to be taken away: the run stops after the step, with a checkpoint, before the deadline.
#
# The first rank of each host watches for the notice, whatever launcher has started it, and asks for a stop as a signal
# to it would. All ranks learn of it in the vote of the step. In an elastic run the launcher watches: see `shoal.fleet`.


@contextmanager
def stopping_when_preempted(run: Run, stop: StopRequest, *, say: Callable[[str], None]) -> Iterator[None]:
    """In the block, a notice that the run file names asks `stop`; `say` hears of it."""
    keys, first = run.run_file.run, run.process.place.local_rank == 0

    def told(notice: Preemption) -> None:
        say(f"{notice.sentence}: saving after this step, and stopping")
        stop.ask()

    file, url = (keys.preemption_file, keys.preemption_url) if first else (None, None)
    with watching_for_preemption(file, url, told=told, warn=say):
        yield


@contextmanager
def stop_request_of(run: Run, *, say: Callable[[str], None]) -> Iterator[StopRequest]:
    """What asks the run to stop: a signal, or a notice."""
    with StopRequest() as stop, stopping_when_preempted(run, stop, say=say):
        yield stop


# One rank of `shoal evaluate`: the weights of a checkpoint on the held-out data, without training.


OTHER_MODEL = "Leave out what changes the model: run.toml in its run directory names the one that was trained"


def evaluate_rank(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    *,
    source: Path,
    bar: ProgressBar | None = None,
    counts_flops: bool = False,
) -> dict[str, float]:
    """The measurements on the held-out data, and the `step` that the weights are from. The same on every rank.

    `counts_flops`: as well `flops`, of the matrix products of a forward of one sample; this process is the only rank.
    """
    bar = bar or ProgressBar()
    run = open_run(run_file, place, objects, activity=bar.update)
    bar.update("verifying and reading the checkpoint")
    step = load_weights(run.state, source, announce=run.process.announce, repair=OTHER_MODEL)
    values = run.evaluate(bar)
    if not values:
        raise DataError("this run has no held-out data to evaluate on")
    if counts_flops:
        values["flops"] = _flops_of_a_sample(run)
    run.mesh.world.barrier().wait()
    return {"step": step, **values}


def _flops_of_a_sample(run: Run) -> float:
    forward_backward, batch = run.generation.forward_backward, next(iter(run.held_out()))
    with torch.no_grad(), evaluating(forward_backward.compute.model):
        return flops_of(lambda: forward_backward.evaluate(batch)) / len(batch.positions)
