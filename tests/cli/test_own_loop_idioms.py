"""What loops of public repositories do to weights, modules and counters, on ranks that have pieces of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.verification.verdict import Verdict
from tests.cli.warm_scripts import compare_script, run_script

ZERO_1 = ("layout.shard=2", "memory.zero=1")
ZERO_3 = ("layout.shard=2", "memory.zero=3")

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return x
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
run = shoal.start(model=model, optimizer=optimizer, data=loader, epochs=1)
for x, y in run.batches():
    run.backward(F.cross_entropy(model(x), y)); optimizer.step(); optimizer.zero_grad()
run.close()
"""

ACT_NORM = """
class ActNorm(nn.Module):
    ready = False
    def __init__(self):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
    def forward(self, x):
        if not self.ready:
            self.loc.data.copy_(-x.mean(0))
            self.scale.data.copy_(1 / x.std(0))
        self.ready = True
        return self.scale * (x + self.loc)
model = Blocks(ActNorm(), nn.Linear(6, 3))
"""


@pytest.mark.parametrize("keys", [ZERO_1, pytest.param(ZERO_3, marks=pytest.mark.slow)], ids=["ZeRO-1", "ZeRO-3"])
def test_weights_that_a_forward_sets_by_its_samples_are_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    """In the first step, on all ranks: each would have other ones, of which every piece would be that of another rank,
    and all copies equal.
    """
    (tmp_path / "mine.py").write_text(HEAD + ACT_NORM + LOOP)
    assert run_script(tmp_path / "mine.py", tmp_path, *keys, world=2) == [2, 2]
    for rank in range(2):
        said = " ".join((tmp_path / f"rank-{rank}.txt").read_text().split())
        assert "was written by the script or by a forward, and not alike on the 2 ranks" in said
        assert "blocks.0." in said
        assert "step 1/" not in said


@pytest.mark.slow
@pytest.mark.parametrize("keys", [ZERO_1, ZERO_3], ids=["ZeRO-1", "ZeRO-3"])
def test_weights_that_were_set_before_the_start_are_trained(keys: tuple[str, ...], tmp_path: Path) -> None:
    """As the refusal says."""
    (tmp_path / "mine.py").write_text(HEAD + ACT_NORM + "model(x)\n" + LOOP)
    verdict = compare_script(tmp_path / "mine.py", tmp_path, *keys, "batch.micro_samples=2", world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, verdict.sentence()


@pytest.mark.slow
def test_weights_that_each_rank_writes_otherwise_are_refused_under_zero_3(tmp_path: Path) -> None:
    """Inside of `full_parameters`, of which each rank keeps its piece."""
    written = "    with run.full_parameters(): model.blocks[0].weight.data.add_(0.1 * run.rank)\nrun.close()"
    text = HEAD + "model = Blocks(nn.Linear(6, 6), nn.Linear(6, 3))\n" + LOOP.replace("run.close()", written)
    (tmp_path / "mine.py").write_text(text)
    assert run_script(tmp_path / "mine.py", tmp_path, *ZERO_3, world=2) == [2, 2]
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert "blocks.0.weight was written by the script or by a forward, and not alike" in said


EMBEDDED = """
model = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Flatten(), nn.Linear(36, 3))
x = (x * 9).long().abs() % 9
"""


@pytest.mark.slow
def test_an_embedding_that_shortens_the_rows_of_its_samples_is_refused(tmp_path: Path) -> None:
    """Before anything is trained; the whole batch on one rank is right."""
    (tmp_path / "mine.py").write_text(HEAD + EMBEDDED + LOOP)
    assert run_script(tmp_path / "mine.py", tmp_path, world=2) == [2, 2]
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert "module 0 (Embedding) has max_norm = 0.5, by which its forward shortens the rows" in said
    assert run_script(tmp_path / "mine.py", tmp_path, world=1) == [0]


OWN_WAYS = """
from torch.nn.utils import prune, spectral_norm, weight_norm
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.zeros(6))])
    def parameters(self):
        return self.vars
    def forward(self, x): return torch.tanh(F.linear(x, *self.vars))
class Net(Blocks):
    def start(self, x):
        weight = next(self.blocks[0].parameters())
        return weight.new_zeros(x.shape) + torch.zeros_like(weight)[0]
    def forward(self, x): return Blocks.forward(self, x + self.start(x))
model = Net(spectral_norm(nn.Linear(6, 6)), Cell(), weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3))
prune.l1_unstructured(model.blocks[3], "weight", 0.5)
"""


@pytest.mark.parametrize("keys", [ZERO_3, pytest.param(ZERO_1, marks=pytest.mark.slow)], ids=["ZeRO-3", "ZeRO-1"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_blocks_read_their_weights_in_their_own_ways(keys: tuple[str, ...], tmp_path: Path) -> None:
    """By hooks that compute a weight before the forward, in a class that has another `parameters()`; and a parameter
    that is in pieces says of which type new tensors are.
    """
    (tmp_path / "mine.py").write_text(HEAD + OWN_WAYS + LOOP)
    verdict = compare_script(tmp_path / "mine.py", tmp_path, *keys, "batch.micro_samples=2", world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, verdict.sentence()


COUNTED = """
class Annealed(Blocks):
    num_iter = 0
    def forward(self, x):
        self.num_iter += 1
        return Blocks.forward(self, x) * (1 - 0.9 ** self.num_iter)
model = Annealed(nn.Linear(6, 3))
"""
BUFFER = COUNTED.replace("    num_iter = 0\n", "").replace(
    "nn.Linear(6, 3))\n", "nn.Linear(6, 3))\nmodel.register_buffer('num_iter', torch.tensor(0))\n"
)


def test_a_model_that_counts_its_forwards_is_warned_of(tmp_path: Path) -> None:
    """As in a well-known collection of autoencoders: once, and where a step has several microbatches."""
    (tmp_path / "mine.py").write_text(HEAD + COUNTED + LOOP)
    assert run_script(tmp_path / "mine.py", tmp_path, "batch.micro_samples=2", world=1) == [0]
    said = (tmp_path / "rank-0.txt").read_text()
    assert said.count("the model counts microbatches in num_iter, 2 by now") == 1


@pytest.mark.slow
def test_a_buffer_counts_steps(tmp_path: Path) -> None:
    """As the warning says."""
    (tmp_path / "mine.py").write_text(HEAD + BUFFER + LOOP)
    verdict = compare_script(tmp_path / "mine.py", tmp_path, *ZERO_1, "batch.micro_samples=2", world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, verdict.sentence()


BROKEN_OFF = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
held_out = torch.utils.data.TensorDataset(torch.randn(9, 6), torch.zeros(9).long())
run = shoal.start(model=model, optimizer=optimizer, data=(loader, held_out), epochs=1)
for x, y in run.batches():
    run.backward(F.cross_entropy(model(x), y)); optimizer.step(); optimizer.zero_grad()
    for number, (x, y) in enumerate(run.held_out()):
        model(x)
        if number == 1: break
    print("batches", number + 1)
run.close()
"""


@pytest.mark.slow
def test_a_loop_over_held_out_samples_is_broken_off_where_only_some_ranks_have_more(tmp_path: Path) -> None:
    """Ranks that leave it by `break` meet nobody there, so those at its end meet nobody either."""
    (tmp_path / "mine.py").write_text(HEAD + "model = Blocks(nn.Linear(6, 6), nn.Linear(6, 3))\n" + BROKEN_OFF)
    assert run_script(tmp_path / "mine.py", tmp_path, *ZERO_3, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()


COPIED = """
import copy
from torch.nn.utils import prune
model = Blocks(prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5), nn.Linear(6, 3))
"""
COPIES = """
    with run.full_parameters():
        for block in model.blocks: block.__dict__.pop("weight", None)
        average = copy.deepcopy(model)
    if run.rank == 0: average(torch.randn(2, 6))
run.close()
"""


@pytest.mark.slow
def test_a_copy_whose_forward_has_hooks_is_called_by_one_rank_alone(tmp_path: Path) -> None:
    """As a moving average of a pruned model: its forward has nothing to gather."""
    (tmp_path / "mine.py").write_text(HEAD + COPIED + LOOP.replace("\nrun.close()", COPIES))
    assert run_script(tmp_path / "mine.py", tmp_path, *ZERO_3, world=2) == [0, 0], (tmp_path / "rank-0.txt").read_text()


CLIPS = """run.backward(F.cross_entropy(model(x), y))
    if run.rank == 0: model.blocks[0].weight.grad.mul_(1.0)
    run.clip_grad_norm_(0.01); optimizer"""


@pytest.mark.slow
def test_a_gradient_that_one_rank_changes_before_a_clip_is_told(tmp_path: Path) -> None:
    """A clip looks at versions anew, and what was done before it is not forgotten."""
    text = HEAD + "model = Blocks(nn.Linear(6, 6), nn.Linear(6, 3))\n"
    text += LOOP.replace("run.backward(F.cross_entropy(model(x), y)); optimizer", CLIPS)
    (tmp_path / "mine.py").write_text(text)
    assert run_script(tmp_path / "mine.py", tmp_path, world=2) == [2, 2]
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert "on rank 0 blocks.0.weight had its gradient changed by the script in the step before" in said
