"""Loops with several optimizers, each step in several microbatches: beside plain PyTorch, which takes it in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.verification.verdict import Verdict
from tests.cli.warm_scripts import compare_script, run_script

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 2), torch.randn(48, 4))
g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
d = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(8, 1))
first, second = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.SGD(d.parameters(), lr=1e-1, momentum=0.9)
run = shoal.start(model=(g, d), optimizer=(first, second), data=data, batch_samples=12, steps=3)
def sides(real, noise):
    return F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()
def fooled(noise):
    return F.softplus(-d(g(noise))).mean()
"""
KFAC_HEAD = "from shoal.optim.kfac import OwnedKFAC\n" + HEAD.replace(
    "torch.optim.SGD(d.parameters(), lr=1e-1, momentum=0.9)", "OwnedKFAC(d.parameters(), lr=0.1, every=2)"
)
ALTERNATING = """
for number, microbatches in run.steps():
    for real, noise in microbatches:
        run.backward(sides(real, noise), optimizer=second)
    second.step(); second.zero_grad()
    for real, noise in microbatches:
        run.backward(fooled(noise), optimizer=first)
    first.step(); first.zero_grad()
"""
AT_ONCE = """
for real, noise in run.batches():
    run.backward(sides(real, noise), optimizer=second)
    run.backward(fooled(noise), optimizer=first)
    torch.nn.utils.clip_grad_norm_(g.parameters(), 0.1)
    second.step(); first.step()
    second.zero_grad(); first.zero_grad()
"""
ONE_LOSS = """
for real, noise in run.batches():
    run.backward(F.mse_loss(g(noise), real) + d(g(noise)).mean())
    torch.nn.utils.clip_grad_norm_([*g.parameters(), *d.parameters()], 0.5)
    first.step(); second.step()
    first.zero_grad(); second.zero_grad()
"""
ONE_AFTER_THE_OTHER = """
for real, noise in run.batches():
    run.backward(sides(real, noise), optimizer=second)
    second.step(); second.zero_grad()
    run.backward(fooled(noise), optimizer=first)
    first.step(); first.zero_grad()
"""
LAST_ALONE = """
for number, microbatches in run.steps():
    for at, (real, noise) in enumerate(microbatches):
        run.backward(sides(real, noise), optimizer=second)
        if at == 3:
            run.backward(fooled(noise), optimizer=first)
    second.step(); first.step()
"""
HALVES = """
import torch
from torch import nn
import shoal

torch.manual_seed(0)
x, y = torch.randn(24, 5), torch.randn(24, 3)
x[:, 0] = torch.where(torch.arange(24) % 6 < 3, 1.0, -1.0)
a, b = nn.Linear(5, 3), nn.Linear(5, 3)
first, second = torch.optim.SGD(a.parameters(), lr=0.2), torch.optim.SGD(b.parameters(), lr=0.2)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
run = shoal.start(model=(a, b), optimizer=(first, second), data=data, epochs=1)
for x, y in run.batches():
    outputs = torch.stack([a(one) if float(one[0]) > 0 else b(one) for one in x])
    run.backward((outputs - y).square().mean())
    first.step(); second.step()
    first.zero_grad(); second.zero_grad()
"""
"""Of a batch the first rank has the samples of one model, and the second rank those of the other."""
CHAIN = """
class Chain(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return x
torch.manual_seed(0)
"""
LOOPS = {"alternating": ALTERNATING, "at once": AT_ONCE, "one loss": ONE_LOSS}
LAYOUTS = {
    "replicated": (),
    "ZeRO-1": ("layout.shard=2", "memory.zero=1"),
    "ZeRO-3": ("layout.shard=2", "memory.zero=3"),
}
IN_TWO = "batch.micro_samples=3"
"""Of the 6 samples that each of two ranks has of a step."""


def check(loop: str, folder: Path, *keys: str) -> None:
    (folder / "mine.py").write_text(HEAD + loop)
    verdict = compare_script(folder / "mine.py", folder, IN_TWO, *keys, world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert {finding.step for finding in verdict.findings} == {1, 2, 3}
    assert {finding.quantity for finding in verdict.findings} == {"loss", "norm", "gradient", "weight"}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_microbatches_of_several_optimizers_are_one_step(loop: str, layout: str, tmp_path: Path) -> None:
    """The discriminator's update before the generator's backward; both backwards before both updates; one loss, and one
    backward, for two optimizers. With dropout, and a clip over what one or both of them train.
    """
    check(LOOPS[loop], tmp_path, *LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), LAYOUTS["ZeRO-1"], ("layout.shard=2", "memory.zero=2", "batch.micro_samples=1")])
def test_ranks_that_use_different_models_meet_in_one_order(keys: tuple[str, ...], tmp_path: Path) -> None:
    """One backward for two optimizers, of which each rank computes the gradients of another one."""
    (tmp_path / "mine.py").write_text(HALVES)
    verdict = compare_script(tmp_path / "mine.py", tmp_path, *keys, world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())


@pytest.mark.slow
def test_models_of_blocks_are_gathered_block_by_block(tmp_path: Path) -> None:
    """Under ZeRO-3 the parameters that a backward is of are in pieces when it begins."""
    script = (HEAD + ALTERNATING).replace("nn.Sequential", "Chain").replace("torch.manual_seed(0)", CHAIN)
    (tmp_path / "mine.py").write_text(script)
    verdict = compare_script(tmp_path / "mine.py", tmp_path, IN_TWO, *LAYOUTS["ZeRO-3"], world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["alternating", "at once"])
def test_kfac_measures_the_backwards_of_its_own_parameters(loop: str, tmp_path: Path) -> None:
    """Those of the generator pass through the layers of the discriminator, and of several microbatches come between."""
    (tmp_path / "mine.py").write_text(KFAC_HEAD + LOOPS[loop])
    verdict = compare_script(tmp_path / "mine.py", tmp_path, IN_TWO, world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())


def test_a_batch_that_weighs_nothing_is_a_sentence_in_plain_pytorch_too(tmp_path: Path) -> None:
    """Of an optimizer that asks what its gradients are the mean of."""
    (tmp_path / "mine.py").write_text(KFAC_HEAD + AT_ONCE.replace("optimizer=second", "optimizer=second, weight=0"))
    said = compare_script(tmp_path / "mine.py", tmp_path, world=1)
    assert isinstance(said, str)
    assert "step 1: all weights of the global batch are 0" in said


@pytest.mark.stress
def test_spectral_norm_moves_once_in_each_pass(tmp_path: Path) -> None:
    """As in one process, whatever the number of microbatches; buffers are compared, too."""
    norm = "nn.utils.parametrizations.spectral_norm(nn.Linear(2, 8))"
    (tmp_path / "mine.py").write_text(
        (HEAD + ALTERNATING).replace("nn.Sequential(nn.Linear(2, 8)", f"nn.Sequential({norm}")
    )
    verdict = compare_script(tmp_path / "mine.py", tmp_path, IN_TWO, world=2)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert "buffer" in {finding.quantity for finding in verdict.findings}


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (ONE_AFTER_THE_OTHER, "another optimizer has made its update between two microbatches of this one"),
        (LAST_ALONE, "1 of 4 microbatches had a backward() for one optimizer"),
        (AT_ONCE.replace(", optimizer=second)", ")"), "for several optimizers, backward(loss, optimizer=...) is for"),
        (ALTERNATING.replace("run.backward(fooled(noise), optimizer=first)", "pass"), "no backward() was called"),
    ],
)  # fmt: skip
def test_what_would_be_another_gradient_is_refused(loop: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + loop)
    (code,) = run_script(tmp_path / "mine.py", tmp_path, IN_TWO, world=1)
    said = (tmp_path / "rank-0.txt").read_text()
    assert code not in (0, 75)
    assert sentence in said
    assert "Traceback" not in said
