"""What `memory.fit_microbatch` chooses: the largest microbatch that fits, in few trials, for the same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config.load import dumps
from shoal.config.named import GIVEN
from shoal.errors import ConfigError, LayoutError
from shoal.launcher.environment import Place
from shoal.observe.events import EventWriter, read_events
from shoal.planning import fitted_microbatch, trial
from shoal.planning.arrange import LOOKING, PLANNER
from shoal.planning.fitted_microbatch import (
    FILE_NAME,
    Fitted,
    Tried,
    first_that_fits,
    made_smaller,
    sizes,
    with_microbatch,
)
from shoal.planning.memory_budget import digest_of
from shoal.runfile.run_file import RunFile
from tests.verification.layouts import corpus, run_file_of
from tests.waiting import HANG_S

SAME = 1e-6
"""Losses in float32, whose terms are added in another order."""


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_the_first_that_fits_is_found_from_anywhere(count: int) -> None:
    """Wherever the search begins; none where none does. A right guess takes two trials at most."""
    for first in range(count):
        for wanted in range(count + 1):
            asked: list[int] = []

            def fits(index: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
                asked.append(index)
                return index >= wanted

            assert first_that_fits(count, first, fits) == (wanted if wanted < count else None)
            assert len(asked) == len(set(asked)) <= 2 * count.bit_length() + 1
            assert first != wanted or len(asked) <= 2


def fitting(folder: Path, **tables: Any) -> RunFile:
    memory = {"fit_microbatch": True, "simulate_device": "4 MiB"}
    return run_file_of(folder, **({"memory": memory, "run": {"processes": 1, "device": "cpu"}} | tables))


@pytest.mark.parametrize(
    ("batch", "model", "wanted"),
    [
        ({"global_samples": 10}, {}, [10, 5, 4, 3, 2, 1]),
        ({"global_samples": 7}, {}, [7, 4, 3, 2, 1]),
        ({"global_samples": 8}, {"kind": "convnet", "group_samples": 2}, [8, 4, 2]),
    ],
)
def test_sizes_cut_a_share_into_equal_parts(
    tmp_path: Path, batch: dict[str, Any], model: dict[str, Any], wanted: list[int]
) -> None:
    """Of whole groups."""
    tables = {"data": {"kind": "digits"}, "model": {**model, "norm": "batch"}} if model else {}
    assert sizes(fitting(tmp_path, batch=batch, **tables)) == wanted


def tried_by(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Trials fit up to so many samples; what is tried."""
    tried: list[int] = []

    def why_not(run_file: RunFile) -> str | None:
        tried.append(run_file.batch.micro_samples or 0)
        return None if tried[-1] <= most else f"{tried[-1]} are too many"

    monkeypatch.setattr(fitted_microbatch, "_why_not", why_not)
    return tried


def test_what_was_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks and by later starts, until something changes; another launcher's ranks cannot find it."""
    tried, place = tried_by(monkeypatch, 3), Place(0, 1, 0, 1, 0, "torchrun")
    run_file = fitting(tmp_path, batch={"global_samples": 12})
    with pytest.raises(ConfigError, match="under torchrun"):
        with_microbatch(run_file, place)
    chosen, why = with_microbatch(run_file, None)
    assert (chosen.batch.micro_samples, chosen.memory.fit_microbatch) == (3, False)
    assert why.startswith("memory.fit_microbatch: 3 samples at a time (")
    asked = len(tried)
    assert with_microbatch(run_file, place)[0] == chosen
    assert len(tried) == asked
    wider = msgspec.structs.replace(run_file, batch=msgspec.structs.replace(run_file.batch, sequence=32))
    with_microbatch(wider, None)
    assert len(tried) > asked


def test_a_run_that_ends_without_memory_goes_on_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From size to size, until there is none, or two of them in a row took it no further."""
    tried_by(monkeypatch, 6)
    for wanted, grows in (([5, 4, 3, 2, 1], True), ([5, 4], False)):
        folder = tmp_path / str(grows)
        run_file = fitting(tmp_path, batch={"global_samples": 30}, run={"directory": str(folder), "device": "cpu"})
        assert with_microbatch(run_file, None)[0].batch.micro_samples == 6
        writer, found = EventWriter(folder, rank=0), []
        while (said := made_smaller(run_file)) is not None:
            found.append(with_microbatch(run_file, None)[0].batch.micro_samples)
            assert said.endswith(f"starts again with {found[-1]}, from its newest checkpoint if there is one")
            if grows:
                writer.write(len(found), {}, time_s=1.0)
        assert found == wanted
    assert made_smaller(fitting(tmp_path, memory={"simulate_device": "4 MiB"})) is None


def test_nothing_that_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried_by(monkeypatch, 0)
    with pytest.raises(LayoutError, match=r"not even 1 sample at a time fit; .* What the trial said: 1 are too many"):
        with_microbatch(fitting(tmp_path), None)


def trained(run_file: RunFile, folder: Path) -> tuple[list[float], str]:
    """The losses of `shoal train` in processes of its own, and what it said."""
    folder.mkdir(exist_ok=True)
    path = folder / "own.toml"
    path.write_text(dumps(run_file), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", str(path), f"run.directory={folder / 'run'}"],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [loss for event in read_events(folder / "run") if (loss := event.get("loss/train")) is not None]
    return losses, done.stderr


@pytest.mark.slow
def test_a_device_is_filled_and_losses_stay(tmp_path: Path) -> None:
    """Two ranks on simulated devices that hold less than their shares: first by trials; then, as though memory had
    been there when it was tried, by a run that runs out of it in its first step and goes on.
    """
    corpus(tmp_path)
    given = {
        "batch": {"global_samples": 16, "sequence": 64},
        "layout": {"replicate": 2},
        "run": {"processes": 2, "device": "cpu", "steps": 3},
    }
    plain, _ = trained(fitting(tmp_path, **given, memory={}), tmp_path / "plain")
    run_file = fitting(tmp_path, **given, memory={"fit_microbatch": True, "simulate_device": "3 MiB"})
    losses, said = trained(run_file, tmp_path / "fitted")
    kept = msgspec.json.decode((tmp_path / "fitted/run" / FILE_NAME).read_bytes(), type=Fitted)
    assert 1 < kept.micro_samples < 8, said
    assert {one.fits for one in kept.tried} == {True, False}
    assert losses == pytest.approx(plain, rel=SAME)
    late = tmp_path / "late/run"
    late.mkdir(parents=True)
    own = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, directory=str(late)))
    (late / FILE_NAME).write_bytes(msgspec.json.encode(Fitted(digest_of(own), 8, [Tried(8, fits=True)])))
    losses, said = trained(run_file, late.parent)
    assert "8 samples at a time did not fit in the end" in said
    assert losses == pytest.approx(plain, rel=SAME)


def test_nothing_is_tried_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof takes the size that a run has found, and leaves nothing in its directory."""
    tried = tried_by(monkeypatch, 2)
    run_file = fitting(tmp_path, batch={"global_samples": 8}, run={"directory": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"here nothing is kept; set memory\.fit_microbatch=false and batch"):
        LOOKING.arrange(run_file, None)
    assert not tried
    assert not (tmp_path / "run").exists()
    PLANNER.arrange(run_file, None)
    assert LOOKING.arrange(run_file, None).batch.micro_samples == 2
    assert LOOKING.made_smaller(run_file) is None
    assert LOOKING.arrange(run_file, None).batch.micro_samples == 2


@pytest.mark.parametrize("table", ["model", "data"])
def test_objects_of_a_script_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """Nor a script's own loop, whose model is one: a trial could not make them."""
    tried = tried_by(monkeypatch, 2)
    run_file = fitting(tmp_path, **{table: {"kind": "python", "build": GIVEN}})
    with pytest.raises(ConfigError, match=f"the {table} of the run are objects of a script.*set batch.micro_samples"):
        with_microbatch(run_file, None)
    assert not tried


@pytest.mark.parametrize(
    ("small", "noise", "wanted"),
    [({"schedule": [{"samples": 2, "until": 20}]}, 0, 8), ({"adaptive": {"first": 2}}, 1, 1)],
    ids=["schedule", "adaptive"],
)
def test_the_largest_steps_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any], noise: int, wanted: int
) -> None:
    """Not the small ones that the run begins with, each of which has two parts where noise is measured."""
    began: list[RunFile] = []

    def short_run(run_file: RunFile, folder: Path, *, steps: int) -> tuple[int, str]:
        began.append(run_file)
        return 0, ""

    monkeypatch.setattr(fitted_microbatch, "short_run", short_run)
    run_file = fitting(tmp_path, batch={"global_samples": 8, **small}, observe={"noise_every_steps": noise})
    chosen, _ = with_microbatch(run_file, None)
    assert chosen.batch.micro_samples == wanted
    assert (began[0].batch.schedule, began[0].batch.adaptive, began[0].batch.global_samples) == ((), None, 8)
    assert (chosen.batch.schedule, chosen.batch.adaptive) == (run_file.batch.schedule, run_file.batch.adaptive)


def test_what_a_run_tells_and_keeps_does_not_ask_for_trials(tmp_path: Path) -> None:
    """Only what decides the peak does."""
    plain = fitting(tmp_path)
    told = {"observe": {"evaluate_every_steps": 3}, "checkpoint": {"every_steps": 2}}
    assert digest_of(fitting(tmp_path, **told)) == digest_of(plain)
    assert digest_of(fitting(tmp_path, observe={"noise_every_steps": 2})) != digest_of(plain)


def test_why_a_run_failed_is_the_line_of_its_rank() -> None:
    """Not that of its report."""
    after = ["bn: 3 steps", "rank 0 of 1 failed (host a, pid 3, exit code 5):", "out of memory (x)", "report: a.html"]
    before = ["x is no number", "2 of 2 ranks failed with this, rank 1 first (host a, pid 3, exit code 1)", "report: b"]
    found = [trial._cause(lines) for lines in (after, before, ["run.steps = 0"], [])]
    assert found == ["out of memory (x)", "x is no number", "run.steps = 0", ""]
