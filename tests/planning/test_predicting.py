"""What a run says of its own step beforehand, and what a machine remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.observe.events import EventWriter, read_events
from shoal.observe.facts import read_facts, write_facts
from shoal.observe.prediction import BASIS, MEMORY, STEP, compared
from shoal.observe.record import read_record
from shoal.observe.report import page
from shoal.observe.summary import summarize
from shoal.planning.calibration import HOW, UNCOVERED, measured_here, unpredicted
from shoal.planning.history import history_path, remembered, track_record
from shoal.planning.prediction import prediction_facts, remember_run
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import Calibration, CollectiveFit, OperatorTime

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def _run(*keys: str) -> RunFile:
    return load_run(ROOT / "recipes/stdlib-gpt.toml", keys)


def _finished(directory: Path, *, predicted_s: float, measured_s: float) -> None:
    write_facts(
        directory, {"name": "one", BASIS: "predicted from what was measured", STEP: predicted_s, MEMORY: 2 * GIB}
    )
    with EventWriter(directory, rank=0) as writer:
        for step in range(1, 10):
            spent_s = 5.0 if step <= 5 else measured_s  # the first steps warm up
            writer.write(step, {"time/step": spent_s, "memory/peak_bytes": GIB}, time_s=1.76e9 + step)


def test_an_unmeasured_machine_predicts_nothing_and_says_how_it_is_measured(tmp_path: Path) -> None:
    """A fact of the run, which the report shows."""
    environ = {"SHOAL_CACHE": str(tmp_path / "cache")}
    facts = prediction_facts(_run(), device="cpu", one_host=True, threads=1, environ=environ)
    assert facts == {BASIS: HOW}
    write_facts(tmp_path, facts)
    record = read_record(tmp_path)
    assert "shoal bench products" in page(record, summarize(record))


def _calibrated(*backends: str, operators: bool = True, dtype: str = "float32") -> Calibration:
    fits = (
        CollectiveFit(backend=name, operation="all_reduce", ranks=2, alpha_s=1e-5, beta_s=1e-9, dtype=dtype)
        for name in backends
    )
    one = OperatorTime(operator="linear", dtype="float32", m=1, n=1, k=1, ranks=1, forward_s=1e-6, backward_s=1e-6)
    return Calibration(machine="one", torch="2", collectives=tuple(fits), operators=(one,) if operators else ())


@pytest.mark.parametrize(
    ("transport", "calibration", "verbs"),
    [
        ("auto", None, ["bench products"]),
        ("auto", _calibrated("shm"), None),
        ("hierarchical", _calibrated("shm"), None),  # on one host its groups are of shared memory
        ("auto", _calibrated(), ["over shm", "'shoal bench comm'"]),
        ("auto", _calibrated("shm", dtype="bfloat16"), ["over shm", "'shoal bench comm'"]),
        ("gloo", _calibrated("shm"), ["over gloo", "'shoal bench comm'"]),
        ("mpi", None, ["bench products", "bench comm --backends mpi"]),
        ("mpi", _calibrated("shm", operators=False), ["bench products", "bench comm --backends mpi"]),
        ("mpi", _calibrated("shm", "gloo"), ["over mpi were not measured", "bench comm --backends mpi"]),
        ("mpi", _calibrated("shm", "mpi"), None),
    ],
)
def test_no_transport_is_priced_as_another(
    transport: str, calibration: Calibration | None, verbs: list[str] | None
) -> None:
    """One that was not measured has no prediction, and every verb that it takes is named."""
    why = unpredicted(_run(f'wire.transport="{transport}"'), calibration)
    assert (why is None) == (verbs is None)
    assert all(verb in (why or "") for verb in verbs or ())
    assert why is None or measured_here(_run(f'wire.transport="{transport}"'), calibration) is None


def test_what_the_sweep_does_not_cover_is_not_predicted(tmp_path: Path) -> None:
    """Another precision, threads that share a rank, GPUs, several hosts."""
    environ = {"SHOAL_CACHE": str(tmp_path)}
    for keys, place in (
        (('precision.kind="bfloat16"',), {}),
        ((), {"threads": 2}),
        ((), {"device": "cuda"}),
        ((), {"one_host": False}),
    ):
        asked = {"device": "cpu", "one_host": True, "threads": 1} | place
        assert prediction_facts(_run(*keys), environ=environ, **asked) == {BASIS: UNCOVERED}  # type: ignore[arg-type]


def test_a_damaged_calibration_stops_no_run(tmp_path: Path) -> None:
    """It is said in the facts."""
    (tmp_path / "calibration.toml").write_text("machine = 3")
    facts = prediction_facts(_run(), device="cpu", one_host=True, threads=1, environ={"SHOAL_CACHE": str(tmp_path)})
    assert set(facts) == {BASIS}
    assert "calibration.toml" in facts[BASIS]


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    """The median step behind the warm-up, and the errors."""
    _finished(tmp_path, predicted_s=0.11, measured_s=0.1)
    record = read_record(tmp_path)
    shown = page(record, summarize(record))
    assert "As predicted?" in shown
    assert "+10.0 %" in shown
    assert "+100.0 %" in shown


def test_only_the_last_life_is_held_against_its_prediction(tmp_path: Path) -> None:
    """Steps and memory behind the last resume; a life without steps has none, and leaves nothing in the history."""
    environ = {"SHOAL_CACHE": str(tmp_path / "cache")}
    _finished(tmp_path, predicted_s=0.11, measured_s=0.1)
    with EventWriter(tmp_path, rank=0) as writer:
        writer.resume(9, time_s=1.76e9 + 20)
    assert compared(read_facts(tmp_path), read_events(tmp_path)) == []
    remember_run(tmp_path, environ)
    assert remembered(environ) == []
    with EventWriter(tmp_path, rank=0) as writer:
        for step in range(10, 20):
            spent_s = 5.0 if step <= 14 else 0.22
            writer.write(step, {"time/step": spent_s, "memory/peak_bytes": GIB / 2}, time_s=1.76e9 + 20 + step)
    step, memory = compared(read_facts(tmp_path), read_events(tmp_path))
    assert (step.measured, memory.measured) == (0.22, GIB / 2)


def test_a_machine_remembers_how_wrong_it_was(tmp_path: Path) -> None:
    """Median and worst over its runs; a torn line counts for nothing; a run without a prediction leaves none."""
    environ = {"SHOAL_CACHE": str(tmp_path / "cache")}
    assert track_record(remembered(environ)) is None
    for number, predicted_s in enumerate((0.1, 0.107, 0.081)):
        directory = tmp_path / f"run-{number}"
        _finished(directory, predicted_s=predicted_s, measured_s=0.1)
        remember_run(directory, environ)
    write_facts(tmp_path / "plain", {"name": "plain"})
    remember_run(tmp_path / "plain", environ)
    with history_path(environ).open("ab") as file:
        file.write(b'{"time_s": 1, "run"')
    assert track_record(remembered(environ)) == "on this machine, 3 runs: median error of the step 7 %, worst 19 %"
