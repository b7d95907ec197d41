"""What the process that started the ranks tells of failures. While the run goes on without those that failed: alerts.
Of a run that failed: how it ended, in the facts and the report, why ranks waited in vain, a capsule to compute the
failed step again, and an alert. Imports no torch before it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import EnvironmentFault, ShoalError, UsageError
from shoal.launcher.spawn import ExitCode
from shoal.launcher.supervision import say
from shoal.observe.config import ObserveConfig
from shoal.observe.events import read_events
from shoal.observe.facts import facts_path, read_facts
from shoal.observe.sink import Ending, write_ending
from shoal.resilience.hang_verdict import read_verdict
from shoal.runfile.run_file import RunFile


def tell_of_failure(run_file: RunFile, directory: Path, code: ExitCode, *, since_s: float) -> None:
    """All of it, of the run in `directory` that began at `since_s` (Unix time) and ended with `code`. Raises
    nothing: what cannot be written or sent is said.
    """
    _record_failure(run_file, directory, code)
    _say_hang(directory, since_s=since_s)
    _leave_capsule(run_file, directory, code, since_s=since_s)
    _alert(run_file.observe, directory, code)


@contextmanager
def alerts(url: str | None, run: str) -> Iterator[Callable[[str], None]]:
    """What sends sentences to the webhook at `url`, if there is one, as warnings of the run of that name. All are sent
    when the block ends.
    """
    if url is None:
        yield lambda _: None
        return
    from shoal.observe.sinks import WebhookSink

    sink = WebhookSink(url, name=run, failures=False, note=say)
    try:
        yield sink.warn
    finally:
        sink.finish(Ending("finished"))


def _record_failure(run_file: RunFile, directory: Path, code: ExitCode) -> None:
    """Into the facts and the report of a run that began, and where it was. Rank 0 does so itself where it ends by a
    decision or an error of its own; one that was killed cannot.
    """
    try:
        if not facts_path(directory).is_file() or read_facts(directory).get("state"):
            return
        write_ending(directory, Ending("failed", code.sentence, code.rank, int(code)))
        if events := read_events(directory):
            say(f"failed at step {events[-1].step:,} of {run_file.run.steps:,}")
        if run_file.observe.report:
            from shoal.observe.report import write_report

            print(f"report: {write_report(directory, picture=False)}", file=sys.stderr, flush=True)
    except (ShoalError, OSError) as error:
        print(f"shoal: how the run ended could not be recorded: {error}", file=sys.stderr, flush=True)


def _say_hang(directory: Path, *, since_s: float) -> None:
    """Why ranks waited in vain, where their watches have found it."""
    verdict = read_verdict(directory, since_s=since_s)
    if verdict is not None:
        say(f"why it hung: {verdict.sentence}")


def _leave_capsule(run_file: RunFile, directory: Path, code: ExitCode, *, since_s: float) -> None:
    """What is needed to compute the failed step again, of a run that began."""
    if not facts_path(directory).is_file():
        return
    from shoal.checkpoint.commit import newest_verified
    from shoal.checkpoint.objects import Places
    from shoal.observe.capsule import Failed, write_capsule

    try:
        events = read_events(directory)
        began = bool(events) and events[-1].time_s >= since_s
        if code in (UsageError.exit_code, EnvironmentFault.exit_code) and not began:
            return  # this start was refused: the capsule of the start before stays
        manifest, _ = newest_verified(directory)
        path = write_capsule(
            directory,
            Failed(int(code), code.rank, code.sentence, code.text),
            seed=run_file.run.seed,
            samples_at=run_file.batch.samples_at,
            checkpoint=None if manifest is None else Places(directory).step(manifest.step),
        )
    except (ShoalError, OSError, ValueError) as error:
        print(f"shoal: no capsule could be written: {error}", file=sys.stderr, flush=True)
    else:
        print(f"capsule: {path}; shoal replay {path} computes the step again", file=sys.stderr, flush=True)


def _alert(observe: ObserveConfig, directory: Path, code: ExitCode) -> None:
    """To the webhook, of an end that a rank could not tell of."""
    if observe.webhook is None:
        return
    from shoal.observe.sinks import post

    try:
        post(observe.webhook, run=directory.name, level="failure", text=code.sentence or str(code), step=0)
    except OSError as error:
        say(f"observe.webhook: the end of the run was not delivered: {error}")


def largest_tensors() -> str:
    """What most of the bytes of this rank's tensors are, in a clause, for one that ran out of memory."""
    from shoal.memory.collector import largest_holders  # imports torch, which the process that starts ranks does not

    return largest_holders()
