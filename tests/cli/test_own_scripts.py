"""Five scripts in the styles of well-known examples, for one process and with Shoal: at most five lines differ, and the
losses are the same on any number of ranks, under ZeRO-3, and through a kill.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from shoal.observe.events import read_events
from tests.cli.warm_scripts import run_plain, run_script

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["nanogpt", "mnist", "imagenet", "finetune", "gan"]
MOST_CHANGED_LINES = 5
LOSS_TOLERANCE = 1e-5
"""Relative, of 8 steps: docs/reference/tolerances.md."""

ZERO_3 = ("layout.shard=2", "memory.zero=3")


def changed_lines(before: str, after: str) -> int:
    """Lines of `after` that are new or replace others, or where there are more, those that went."""
    codes = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, _lines(after, j1, j2)) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def _lines(text: str, first: int, last: int) -> int:
    return sum(bool(line.strip()) for line in text.splitlines()[first:last])


def plain_losses(name: str, folder: Path) -> list[float]:
    """The loss of each step of the script without Shoal, which takes the mean over the batches that it accumulates."""
    printed = run_plain(SCRIPTS / f"{name}_before.py", folder)
    found = [float(text) for text in re.findall(r"loss (\S+)$", printed, flags=re.MULTILINE)]
    each = 2 if name == "nanogpt" else 1
    return [sum(found[i : i + each]) / each for i in range(0, len(found), each)]


def losses(name: str, folder: Path) -> list[float]:
    """The loss of each step of a run, whoever computed it last."""
    events = read_events(folder / "runs" / f"{name}_after", 0)
    found = {event.step: loss for event in events if (loss := event.get("loss/train")) is not None}
    return [found[step] for step in sorted(found)]


def trained(name: str, folder: Path, *overrides: str, world: int) -> list[float]:
    codes = run_script(SCRIPTS / f"{name}_after.py", folder, *overrides, world=world)
    assert codes == [0] * world, (folder / "rank-0.txt").read_text()
    return losses(name, folder)


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_change(name: str) -> None:
    before, after = ((SCRIPTS / f"{name}_{which}.py").read_text() for which in ("before", "after"))
    assert 0 < changed_lines(before, after) <= MOST_CHANGED_LINES


def test_changed_lines_are_counted() -> None:
    """New, replaced and removed lines; a replaced one counts once."""
    assert changed_lines("a\nb\nc\n", "a\nx\nc\n") == 1
    assert changed_lines("a\nb\nc\n", "a\nc\n") == 1
    assert changed_lines("a\nc\n", "a\nb1\nb2\nc\n") == 2


@pytest.mark.slow
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_killed_under_zero_3_and_resumed_on_three_ranks(name: str, tmp_path: Path) -> None:
    """Two ranks under ZeRO-3, one of which dies in the sixth step; then three ranks that divide nothing: every step has
    the loss of the script without Shoal, so every sample was used once and in order, and rates and moments went on.
    """
    expected = plain_losses(name, tmp_path)
    each = 2 if name == "gan" else 1
    codes = run_script(
        SCRIPTS / f"{name}_after.py", tmp_path, *ZERO_3, "checkpoint.every_steps=2", world=2, dies_at=5 * each + 1
    )
    assert codes[1] == -9
    assert codes[0] != 0
    assert losses(name, tmp_path) == pytest.approx(expected[:5], rel=LOSS_TOLERANCE)
    assert trained(name, tmp_path, world=3) == pytest.approx(expected, rel=LOSS_TOLERANCE)
    said = (tmp_path / "rank-0.txt").read_text()
    assert re.search("resuming from the checkpoint of step [24]", said), "the newest that was whole"


@pytest.mark.stress
@pytest.mark.parametrize("layout", ["1", "1 batch.micro_samples=4", "2", "3", "2 layout.shard=2 memory.zero=2"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(name: str, layout: str, tmp_path: Path) -> None:
    if "micro" in layout and name in ("finetune", "gan"):
        pytest.skip("a scheduler behind every batch, and two optimizers, take a step in one microbatch")
    world, *overrides = layout.split()
    found = trained(name, tmp_path, *overrides, world=int(world))
    assert found == pytest.approx(plain_losses(name, tmp_path), rel=LOSS_TOLERANCE)
