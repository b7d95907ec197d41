"""What `memory.budget` chooses: the first mixture that fits, of those that the run can use, with its bill."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal import units
from shoal.errors import ConfigError, LayoutError
from shoal.launcher.environment import Place
from shoal.planning import memory_budget
from shoal.planning.memory_budget import FILE_NAME, Bill, hurried, mixtures, needed, with_budget
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile
from tests.verification.layouts import corpus, run_file_of

MIB = 1 << 20


@pytest.fixture
def budgeted(tmp_path: Path) -> RunFile:
    return run_file_of(tmp_path, memory={"budget": "30 MiB"}, run={"processes": 1, "device": "cpu"})


def peaks(monkeypatch: pytest.MonkeyPatch, found: list[int | None]) -> list[RunFile]:
    """Trials have these peaks, in order; what is tried."""
    tried: list[RunFile] = []

    def peak_of(run_file: RunFile) -> tuple[int | None, str]:
        tried.append(run_file)
        return found[min(len(tried), len(found)) - 1], "why not"

    monkeypatch.setattr(memory_budget, "peak_of", peak_of)
    return tried


def test_a_trial_has_the_masks_and_references_that_its_run_will_have(tmp_path: Path) -> None:
    """Though the run makes them later than a trial ends."""
    masks = {"kind": "magnitude", "density": 0.1, "schedule": {"begin": 8, "every": 2}}
    run_file = run_file_of(tmp_path, sparsity=masks, freeze={"progress": {"criterion": "activations", "every": 5}})
    assert "would end before it has its density" in str(refusal(in_steps(run_file, 3)))
    tried = in_steps(hurried(run_file, 3), 3)
    assert refusal(tried) is None
    assert tried.sparsity is not None
    assert (tried.sparsity.schedule.begin, tried.sparsity.schedule.end, tried.sparsity.density) == (2, 3, 0.1)
    assert tried.freeze is not None
    assert tried.freeze.progress is not None
    assert (tried.freeze.progress.every, tried.freeze.progress.patience) == (1, 4)


def in_steps(run_file: RunFile, steps: int) -> RunFile:
    return msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, steps=steps))


def test_the_cheapest_that_fits_is_used_and_held_to_the_budget(
    budgeted: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = peaks(monkeypatch, [60 * MIB, None, 30 * MIB + 1, 30 * MIB])
    chosen, why = with_budget(budgeted, None)
    assert [one.memory.simulate_device for one in tried] == ["1024 GiB"] * 4
    assert chosen.memory.simulate_device == "30 MiB"
    assert chosen.memory.budget is None
    assert (chosen.memory.offload, chosen.memory.recompute) == (tried[3].memory.offload, tried[3].memory.recompute)
    assert "needs 30 MiB (the run as it is needs 60 MiB;" in why
    assert 'memory.offload.optimizer = "host" did not run: why not;' in why
    bill = msgspec.json.decode((tmp_path / "run" / FILE_NAME).read_bytes(), type=Bill)
    assert [one.peak_bytes for one in bill.tried] == [60 * MIB, None, 30 * MIB + 1, 30 * MIB]


def test_ranks_and_later_starts_use_what_was_chosen(budgeted: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something changes that the peak depends on. A rank of another launcher cannot choose for all."""
    tried, place = peaks(monkeypatch, [60 * MIB, 20 * MIB]), Place(0, 1, 0, 1, 0, "torchrun")
    with pytest.raises(ConfigError, match="under torchrun"):
        with_budget(budgeted, place)
    first, _ = with_budget(budgeted, None)
    longer = msgspec.structs.replace(budgeted, run=msgspec.structs.replace(budgeted.run, steps=999))
    assert with_budget(longer, place)[0].memory == first.memory
    assert len(tried) == 2
    wider = msgspec.structs.replace(budgeted, batch=msgspec.structs.replace(budgeted.batch, sequence=32))
    with_budget(wider, None)
    assert len(tried) == 3


def test_a_budget_that_nothing_meets_says_by_how_much(budgeted: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks(monkeypatch, [60 * MIB, 41 * MIB, 50 * MIB])
    given = msgspec.structs.replace(budgeted.memory.offload, part="1 MiB")
    own = msgspec.structs.replace(budgeted, memory=msgspec.structs.replace(budgeted.memory, offload=given))
    with pytest.raises(LayoutError, match=r"short by 11 MiB: .* met is 41 MiB, with memory\.offload\.optimizer"):
        with_budget(own, None)


def test_the_least_is_one_that_is_met(budgeted: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the state are larger under a larger budget: three of them and 38 MiB, not what the trials needed."""
    tried: list[RunFile] = []

    def peak_of(run_file: RunFile) -> tuple[int | None, str]:
        tried.append(run_file)
        return 38 * MIB + 3 * run_file.memory.offload.part_bytes, ""

    monkeypatch.setattr(memory_budget, "peak_of", peak_of)
    with pytest.raises(LayoutError) as refused:
        with_budget(budgeted, None)
    found = re.search(r"the least that is met is ([0-9.]+ MiB), with", str(refused.value))
    assert found is not None
    raised = msgspec.structs.replace(budgeted.memory, budget=found[1])
    chosen, _ = with_budget(msgspec.structs.replace(budgeted, memory=raised), None)
    assert peak_of(chosen)[0] <= (raised.budget_bytes or 0) < 43 * MIB


@pytest.mark.parametrize("size", [1, 1000, 41 * MIB + 1, 42_000_001, (1 << 30) + 5, 123_456_789_012])
def test_a_size_is_written_as_no_less(size: int) -> None:
    """In three digits, as people read it."""
    text = memory_budget._no_less(size)
    assert size <= units.memory_bytes(text) <= 1.011 * size + 1


@pytest.mark.parametrize(
    ("given", "absent"),
    [({"optimizer": {"kind": "muon"}}, "offload.optimizer"), ({"run": {"compile": True}}, "offload.activations")],
)
def test_mixtures_are_those_that_the_run_can_use(tmp_path: Path, given: dict[str, Any], absent: str) -> None:
    """Each once, and what the run file says itself in all of them."""
    found = [keys for keys, _, _ in mixtures(run_file_of(tmp_path, **given))]
    assert not any(absent in keys for keys in found)
    assert len(set(found)) == len(found)
    own = run_file_of(tmp_path, memory={"recompute": "full", "offload": {"optimizer": "disk", "part": "1 MiB"}})
    for _, _, changed in mixtures(own):
        assert changed.memory.recompute == "full"
        assert changed.memory.offload.optimizer == "disk"
        assert changed.memory.offload.part == "1 MiB"


def test_a_run_that_no_device_can_count_is_refused(tmp_path: Path) -> None:
    run = {"processes": 1, "device": "cpu", "compile": True}
    with pytest.raises(ConfigError, match=r"memory\.budget needs .*run\.compile"):
        with_budget(run_file_of(tmp_path, memory={"budget": "30 MiB"}, run=run), None)


@pytest.mark.stress
def test_a_real_budget_is_met(tmp_path: Path) -> None:
    """Half of the peak: the trial's peak is the run's, as the ledger holds it to that."""
    corpus(tmp_path)
    model = {"kind": "gpt", "vocabulary": 61, "layers": 6, "width": 64, "heads": 4}
    given = {"model": model, "run": {"processes": 1, "device": "cpu"}, "batch": {"sequence": 64}}
    plain, _ = memory_budget.peak_of(run_file_of(tmp_path, **given, memory={"simulate_device": "1 GiB"}))
    assert plain is not None
    chosen, _ = with_budget(run_file_of(tmp_path, **given, memory={"budget": f"{plain // 2048} KiB"}), None)
    assert memory_budget.peak_of(chosen)[0] is not None


def test_what_steps_differ_by_is_asked_for_once_more() -> None:
    """Not what the first, in which state is made, has less or more."""
    assert needed([50.0]) == 50
    assert needed([50.0, 70.0, 70.0]) == 70
    assert needed([90.0, 70.0, 70.0]) == 90
    assert needed([50.0, 70.0, 64.0]) == 76
