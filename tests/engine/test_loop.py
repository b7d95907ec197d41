"""The loop around a step: what is due when, who ends it, and what is told. One process, a small GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench.training_job import start_alone, training_job
from shoal.checkpoint.save import Saver, SaveReport
from shoal.engine.loop import Cadence, Job, steps, take_step, train
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.save_policy import EverySteps
from shoal.engine.step import TrainStep
from shoal.engine.tally import StepResult
from shoal.errors import Diverged, EnvironmentFault, Stopped
from shoal.observe.sink import Sinks
from tests.verification.layouts import corpus, run_file_of


class Diary:
    """A sink that writes down what it hears."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.warnings: list[str] = []

    def record(self, step: int, values: object, *, time_s: float) -> None:
        self.steps.append(step)

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def activity(self, what: str) -> None:
        pass


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def job(tmp_path: Path, diary: Diary) -> Iterator[Job]:
    """Six steps, which begin with nothing due in between."""
    corpus(tmp_path)
    run_file = run_file_of(tmp_path, run={"processes": 1, "device": "cpu"})
    with ExitStack() as stack:
        training = start_alone(run_file, stack)
        made = training_job(training, tmp_path / "run", stack)
        yield replace(made, cadence=Cadence(6), sinks=Sinks(diary))


def saved_steps(job: Job) -> list[int]:
    """The steps whose checkpoints were asked for; the job's saver goes on writing them."""
    asked: list[int] = []
    save = job.saver.save

    def noted(step: int, *args: object, **keys: object) -> float:
        asked.append(step)
        return save(step, *args, **keys)

    job.saver.save = noted
    return asked


def test_evaluations_and_saves_come_when_they_are_due(job: Job) -> None:
    """Every second step is evaluated and every fourth saved; at the end both, once."""
    asked, evaluated = saved_steps(job), []
    job = replace(
        job,
        cadence=Cadence(6, evaluate_every=2),
        saves=EverySteps(4),
        evaluate=lambda: evaluated.append(job.progress.step) or {},
    )
    train(job)
    assert evaluated == [2, 4, 6]
    assert asked == [4, 6]


def test_nothing_is_called_an_evaluation_without_data_for_one(job: Job) -> None:
    """The live line says "evaluating" where there is something to evaluate."""
    said: list[str] = []
    job.sinks.activity = said.append
    train(replace(job, evaluate=None))
    assert "evaluating" not in said
    assert any("checkpoint" in text for text in said)


def test_a_script_s_own_save_is_made_after_its_step(job: Job) -> None:
    """Whoever takes the steps may ask for a checkpoint after any of them."""
    asked = saved_steps(job)
    for pending in steps(job):
        pending.result = pending.taken_by(job.step)
        pending.save = pending.number == 3
    assert asked == [3, 6]


def test_a_stop_saves_and_says_how_to_go_on(job: Job) -> None:
    """The step under way is finished and saved; no evaluation keeps the machine that is to be given back."""
    asked, evaluated = saved_steps(job), []
    job = replace(
        job,
        cadence=Cadence(6, evaluate_every=1),
        stop_requested=lambda: job.progress.step == 2,
        evaluate=lambda: evaluated.append(job.progress.step) or {},
    )
    with pytest.raises(Stopped, match="step 3 by a signal"):
        train(job)
    assert evaluated == [1, 2]
    assert asked == [3]


def test_a_stop_in_the_last_step_is_the_end(job: Job) -> None:
    """A run that has reached its last step has finished, whatever was asked for meanwhile."""
    train(replace(job, stop_requested=lambda: job.progress.step == 5))
    assert job.progress.step == 6


def test_a_generation_that_ends_leaves_after_its_step(job: Job) -> None:
    """Neither saved nor at an end: the next generation goes on from the state in memory."""
    asked = saved_steps(job)
    train(replace(job, leaves=lambda result: job.progress.step == 4))
    assert job.progress.step == 4
    assert asked == []


def test_a_state_carried_over_at_the_last_step_is_saved(job: Job) -> None:
    """Whoever took the last step was lost before the save: this generation takes no step, and saves it."""
    train(replace(job, leaves=lambda result: job.progress.step == 5))
    asked = saved_steps(job)
    train(replace(job, cadence=Cadence(5), carried_over=True))
    assert asked == [5]


def test_copies_are_compared_before_what_shows_them(job: Job) -> None:
    """By default after steps 2 and 10 and every 100, before every save and evaluation, and in no other step."""
    compared: list[int] = []
    job = replace(
        job,
        cadence=Cadence(6, evaluate_every=3, compare_every=None),
        compare=lambda: compared.append(job.progress.step),
    )
    train(job)
    assert compared == [2, 3, 6]
    assert [n for n in range(1, 301) if job.cadence.compares(n, shown=False)] == [2, 10, 100, 200, 300]


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(job: Job, diary: Diary) -> None:
    """The steps are taken, and lost: that is no success. The reason was told."""

    class Full:
        """A saver whose disk is full."""

        def __init__(self) -> None:
            self._reports: list[SaveReport] = []

        def save(self, step: int, tensors: object, state: object, **origin: object) -> float:
            self._reports.append(SaveReport(step, 0.0, 0, 0, committed=False, error=f"step {step}: the disk is full"))
            return 0.0

        def poll(self) -> list[SaveReport]:
            taken, self._reports = self._reports, []
            return taken

        def wait(self) -> list[SaveReport]:
            return self.poll()

    saver: Saver = Full()  # type: ignore[assignment]
    with pytest.raises(EnvironmentFault, match="step 6 was reached, but its checkpoint could not be written"):
        train(replace(job, saver=saver, saves=EverySteps(3)))
    assert diary.warnings == ["step 3: the disk is full", "step 6: the disk is full"]
    assert diary.steps == [1, 2, 3, 4, 5, 6]


class Spoiled:
    """A step that calls `take` in its own place."""

    def __init__(self, step: TrainStep, take: Callable[..., StepResult]) -> None:
        self._step, self._take = step, take

    def __getattr__(self, name: str) -> object:
        return getattr(self._step, name)

    def __call__(self, *args: object, **keys: object) -> StepResult:
        return self._take(*args, **keys)


def test_steps_that_are_not_finite_are_told_and_at_last_stop_the_run(job: Job, diary: Diary) -> None:
    """Two in a row are skipped with a warning; a good one between them starts the count again; the third stops."""
    job = replace(job, cadence=Cadence(20), guard=NonfiniteGuard(3, job.step.context))
    bad = {2, 3, 5, 6, 7}

    def spoiling(number: int, *args: object, **keys: object) -> StepResult:
        result = step(number, *args, **keys)
        return replace(result, loss=math.nan, norm=math.nan, committed=False) if number in bad else result

    step, job = job.step, replace(job, step=Spoiled(job.step, spoiling))
    with pytest.raises(Diverged, match="3 steps in a row were not finite, the last was step 7"):
        train(job)
    assert [sentence.split(" was", 1)[0] for sentence in diary.warnings] == ["step 2", "step 3", "step 5", "step 6"]
    assert "1 in a row; at 3 the run stops" in diary.warnings[2]


@pytest.mark.parametrize(
    ("loss", "said"), [(math.nan, "the loss of them is nan: look"), (1.0, "the gradient overflow")]
)
def test_what_was_not_finite_first_is_said(job: Job, loss: float, said: str) -> None:
    """Where samples and outputs are finite, the loss, or else the gradient."""
    job = replace(job, cadence=Cadence(20), guard=NonfiniteGuard(1, job.step.context))

    def spoiling(number: int, *args: object, **keys: object) -> StepResult:
        return replace(step(number, *args, **keys), loss=loss, norm=math.nan, committed=False)

    step, job = job.step, replace(job, step=Spoiled(job.step, spoiling))
    with pytest.raises(Diverged, match=said):
        train(job)


def test_one_step_is_taken_and_nothing_after_it(job: Job) -> None:
    """As benchmarks take them: it counts, and neither saves nor evaluates."""
    asked = saved_steps(job)
    result = take_step(replace(job, cadence=Cadence(1, evaluate_every=1), saves=EverySteps(1)))
    assert result.committed
    assert job.progress.step == 1
    assert asked == []
