"""What rank 0 does when training is over: text from the model, a bigram beside the loss, the speed for later plans."""

from __future__ import annotations

from pathlib import Path

from shoal.assembly.run import Run
from shoal.assembly.sampling import sample_text, unsplit_model
from shoal.errors import CorruptCheckpoint, UsageError
from shoal.observe.facts import write_facts
from shoal.observe.forecast import Forecast
from shoal.observe.sink import Sinks


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
