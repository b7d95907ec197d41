"""Loops whose ranks do not do the same: each is a sentence on every rank, and no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.warm_scripts import run_script

SCRIPT = """
import torch
import torch.nn.functional as F
import shoal

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
run = shoal.start(model=model, optimizer=optimizer, data=(data, data), batch_samples=12, steps=8)
for step, (x, y) in enumerate(run.batches(), start=1):
    BEFORE
    run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    AFTER
run.close()
print("closed after", run.steps_done)
"""


def said(folder: Path, *, before: str = "pass", after: str = "pass") -> tuple[list[int], list[str]]:
    (folder / "mine.py").write_text(SCRIPT.replace("BEFORE", before).replace("AFTER", after))
    codes = run_script(folder / "mine.py", folder, world=2)
    return codes, [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("after", "call"),
    [
        ("if run.rank == 1 and step == 3: break", "the end of the loop"),
        ("if run.rank == 1 and step == 3: run.sum(1.0)", "sum() or mean()"),
        ("if run.rank == 0 and step == 3: run.export('weights.safetensors')", "export()"),
        ("if run.rank == 0 and step == 3: list(run.held_out())", "held_out()"),
    ],
)
def test_one_rank_does_something_else(after: str, call: str, tmp_path: Path) -> None:
    """Both ranks end with the sentence that says in which calls they are."""
    codes, texts = said(tmp_path, after=after)
    assert codes == [2, 2]
    for text in texts:
        assert "of 2 ranks 1 in the next step and 1 in " + call in text
        assert "Traceback" not in text


def test_one_rank_skips_a_batch(tmp_path: Path) -> None:
    """The one that skips says so, and the other that it lost it."""
    codes, texts = said(tmp_path, before="if run.rank == 1 and step == 3: continue")
    assert codes == [3, 2]
    assert "step 3: no backward() was called for microbatch 1 of 1" in texts[1]
    assert "rank 1" in texts[0]


def test_all_ranks_leave_together(tmp_path: Path) -> None:
    """After the third update: the run has stopped there, and says that it has."""
    codes, texts = said(tmp_path, after="if step == 3: break")
    assert codes == [0, 0]
    assert "closed after 3" in texts[0]
    assert "the loop was left after step 3 of 8" in texts[0]
