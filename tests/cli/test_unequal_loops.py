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


@pytest.mark.slow
def test_one_rank_leaves_out_a_call_of_the_default_group(tmp_path: Path) -> None:
    """PyTorch's own `all_reduce`: both ends say so, and the verdict has the group and the line of either rank."""
    body = "if run.rank == 0 and step == 3: torch.distributed.all_reduce(torch.ones(()))"
    script = SCRIPT.replace("BEFORE", "pass").replace("AFTER", body)
    (tmp_path / "mine.py").write_text(script)
    codes = run_script(tmp_path / "mine.py", tmp_path, "wire.report_hang_s=1", "wire.timeout_s=6", world=2)
    assert codes == [3, 3]
    text = (tmp_path / "rank-0.txt").read_text()
    line = next(number for number, row in enumerate(script.splitlines(), start=1) if "all_reduce" in row)
    assert f"call 1 of group 'world-torch.distributed' at {tmp_path / 'mine.py'}:{line}" in text
    assert "rank 1 waits for rank 0" in text
