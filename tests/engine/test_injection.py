"""The injector strikes where it is told to, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.comm.conditions import Conditions
from shoal.comm.ledger import Sent
from shoal.engine.injection import Injector, flipped, injector_from
from shoal.resilience.faults import Fault, strikes, write_faults


def injector(folder: Path, *faults: Fault, rank: int = 0) -> Injector:
    """That of a rank whose launcher is this process."""
    if not folder.exists():
        write_faults(list(faults), folder)
    return Injector(folder, list(faults), rank=rank, launcher=0)


def full(label: str, **more) -> Fault:
    return Fault(action="fail_disk", label=label, **more)


def struck_at(found: Injector, labels: list[str]) -> list[int]:
    """Which of the passings of `labels` raise."""
    raised = []
    for index, label in enumerate(labels):
        try:
            found.reached(label)
        except OSError:
            raised.append(index)
    return raised


def test_without_the_variable_there_is_no_injector() -> None:
    """A run that nobody rehearses has none."""
    assert injector_from({"RANK": "0"}) is None


def test_a_fault_strikes_at_its_passing_in_its_step_on_its_rank(tmp_path: Path) -> None:
    """Passings are counted from the beginning of a step; other ranks and steps are left alone."""
    fault = full("collective/before", step=2, passing=3, rank=1)
    other, own = injector(tmp_path / "a", fault), injector(tmp_path / "a", fault, rank=1)
    for step in (1, 2, 3):
        other.begin(step)
        own.begin(step)
        assert struck_at(other, ["collective/before"] * 5) == []
        assert struck_at(own, ["collective/before"] * 5) == ([2] if step == 2 else [])
    (strike,) = strikes(tmp_path / "a")
    assert (strike.step, strike.rank, strike.label) == (2, 1, "collective/before")


def test_a_save_is_struck_in_or_after_its_step(tmp_path: Path) -> None:
    """A save runs behind the steps: the first passing from the step on counts."""
    found = injector(tmp_path / "a", full("save/commit/rename.before", step=4))
    found.begin(2)
    assert struck_at(found, ["save/commit/rename.before"]) == []
    found.begin(5)
    assert struck_at(found, ["save/commit/rename.before"] * 3) == [0]


def test_faults_strike_in_their_order_and_once_in_all_starts(tmp_path: Path) -> None:
    """The second waits for the first, and a new process strikes neither again."""
    first, second = full("step/before", step=3), full("recovery/in")
    before = injector(tmp_path / "a", first, second)
    assert struck_at(before, ["recovery/in"]) == []
    before.begin(3)
    assert struck_at(before, ["step/before"]) == [0]
    after = injector(tmp_path / "a", first, second)
    assert struck_at(after, ["recovery/in", "recovery/in"]) == [0]
    again = injector(tmp_path / "a", first, second)
    again.begin(3)
    assert struck_at(again, ["recovery/in", "step/before"]) == []


def test_collectives_pass_labels_before_and_behind_the_hand_over(tmp_path: Path) -> None:
    """`fault` is asked before an operation is handed over, `due_s` after it."""
    here = injector(tmp_path / "a", full("collective/before"), full("collective/in"))
    wire = here.conditions(Conditions(bytes_per_second=1e9))
    with pytest.raises(OSError):
        wire.fault("all_reduce", 0)
    assert wire.fault("all_reduce", 1) is None
    with pytest.raises(OSError):
        wire.due_s(Sent(8, 0))
    assert wire.due_s(Sent(8, 0)) > 0, "the rate of the lab was lost"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_flipped_bit_is_one_bit_of_one_element(dtype: torch.dtype) -> None:
    """The value stays finite, of its sign and of its power of two."""
    tensor = torch.randn(17, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = flipped(tensor)
    (index,) = torch.nonzero((changed != tensor).flatten()).flatten().tolist()
    before, after = float(tensor.flatten()[index]), float(changed.flatten()[index])
    assert before * after > 0
    assert 0.5 <= after / before <= 2
    bits = tensor.view(torch.uint8) ^ changed.view(torch.uint8)
    assert sum(int(byte).bit_count() for byte in bits.flatten()) == 1
