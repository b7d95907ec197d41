"""ZeRO beside `layout.tensor` in a script's own loop: the same loop in plain PyTorch, and one checkpoint for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.test_own_tensor import (
    ADAPTED,
    AVERAGED,
    CLIPPED,
    FOREACH,
    LLAMA,
    LOOP,
    MASKED,
    OWN_GPT,
    QWEN,
    ROUNDING,
    check_same,
    outcome,
    written,
)
from tests.cli.warm_scripts import compare_script, run_script

BOTH = ("layout.tensor=2", "layout.shard=2")
RATES = "\noptimizer.param_groups[1]['lr'] = 3e-3"
ACCUMULATED = ("batch.micro_samples=1",)
WIPED = CLIPPED + "; optimizer.zero_grad(set_to_none=run.steps_done % 2 == 0)"
REPLACED = """run.backward(loss_of(x))
    if run.last_of_step:
        total = sum(float(p.grad.square().sum()) for p in before)
        for p in before: p.grad = p.grad * 0.5 + 0.01 * total * p.grad.sign()
        before[2].grad = torch.full_like(before[2].grad, 0.01)
    optimizer.step(); optimizer.zero_grad()"""
FROZEN = CLIPPED + "\n    if run.update: model.model.layers[0].requires_grad_(run.steps_done % 2 == 1)"
FISHER = """run.backward(loss_of(x))
    if run.last_of_step:
        for own, p in zip(fisher, before, strict=True): own.add_(p.grad ** 2)
        for own, p in zip(fisher, before, strict=True): p.grad.div_(own.sqrt() + 1e-3)
    optimizer.step()"""
UNDROPPED = LLAMA.replace("attention_dropout=0.1", "attention_dropout=0.0")
SAME = {
    "tied, dropout, clipped, two rates, wiped in between": (LLAMA, WIPED, RATES, ACCUMULATED),
    "norms of heads, all gradients in one call": (QWEN, FOREACH, "", ("batch.micro_samples=2",)),
    "the run's own clip": (
        QWEN, "run.backward(loss_of(x)); run.clip_grad_norm_(0.5); optimizer.step()", RATES, ACCUMULATED),
    "weighed by tokens, heads fewer than ranks": (
        OWN_GPT, "run.backward(loss_of(x), weight=x.numel()); torch.nn.utils.clip_grad_norm_(before, 0.5)\n"
        "    optimizer.step()", "", ("batch.micro_samples=2",)),
    "read and replaced": (OWN_GPT, REPLACED, "", ()),
    "in tensors of the script's": (
        QWEN, FISHER, "\nfisher = [torch.zeros_like(p, dtype=torch.float64) for p in before]", ()),
    "frozen and let go": (LLAMA, FROZEN, "", ACCUMULATED),
    "hooks and an average": (UNDROPPED, LOOP + "\n    if run.update: evaluated()", MASKED + AVERAGED, ACCUMULATED),
    "adapters of peft": (ADAPTED, CLIPPED, "", ACCUMULATED),
    "state let go": (
        QWEN, LOOP + "\n    if run.update: [optimizer.state.pop(p, None) for p in before[3:9]]", "", ()),
}  # fmt: skip


@pytest.mark.matrix(rows=(0, 8, 13, 20, 23, 26))
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", SAME)
def test_a_split_loop_with_zero_is_the_same_model(name: str, zero: int, tmp_path: Path) -> None:
    """Losses, norms, gradients and weights of three steps are those of plain PyTorch in one process."""
    model, loop, more, keys = SAME[name]
    path = written(tmp_path, model, loop, OPTIMIZER=more)
    check_same(compare_script(path, tmp_path, *BOTH, f"memory.zero={zero}", *keys, world=4))


@pytest.mark.stress
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_split_models_with_zero(zero: int, tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA, CLIPPED)
    keys = (*BOTH, "layout.replicate=2", f"memory.zero={zero}", *ACCUMULATED)
    check_same(compare_script(path, tmp_path, *keys, world=8))


CHAINS: dict[str, Sequence[tuple[int, Sequence[str]]]] = {
    "ZeRO-1 first": ((4, (*BOTH, "memory.zero=1")), (1, ())),
    "ZeRO-3 later": ((1, ()), (4, (*BOTH, "memory.zero=3"))),
    "ZeRO-3, then ZeRO-2": ((4, (*BOTH, "memory.zero=3")), (4, (*BOTH, "memory.zero=2"))),
}


@pytest.mark.slow
def test_checkpoints_know_neither_axis(tmp_path: Path) -> None:
    """Weights, moments and held-out losses of a run that goes on under another layout are those of one process."""
    wanted, weights = outcome(tmp_path / "whole", (1, ()))
    for number, (name, starts) in enumerate(CHAINS.items()):
        found, exported = outcome(tmp_path / str(number), *starts)
        assert found == pytest.approx(wanted, rel=ROUNDING), name
        assert exported.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(exported[key], weight, rtol=ROUNDING, atol=ROUNDING)


WRITE = LOOP + """
    with run.full_parameters(), torch.no_grad():
        if run.rank == {rank}: {name}.weight.mul_(1.1)"""  # fmt: skip
SHARE = LOOP + """
    with run.evaluation():
        for _ in range(1 + run.share[0]): model(x[:1])
    for x in run.held_out():
        if run.share[0]: model(x)"""  # fmt: skip
TOLD = {
    "a split weight that one rank writes": (
        WRITE.format(rank=1, name="model.lm_head"), (*BOTH, "memory.zero=1"), "write the same on every rank"),
    "a split weight that one share writes": (
        WRITE.format(rank="2 or run.rank == 3", name="model.lm_head"), (*BOTH, "memory.zero=2"),
        "write the same on every rank"),
    "a norm that one rank writes": (
        WRITE.format(rank=3, name="model.model.norm"), (*BOTH, "memory.zero=3"), "write the same on every rank"),
    "other numbers in a norm": (
        WRITE.format(rank="run.rank", name="model.model.norm").replace("mul_(1.1)", "add_(1 + run.rank % 2)"),
        (*BOTH, "memory.zero=1"), "write the same on every rank"),
    "a forward of one rank": (
        "run.rank or model(x)\n    " + LOOP, (*BOTH, "memory.zero=3"), "so let no `if` that is true on one of them"),
    "without layout.tensor": (
        WRITE.format(rank=1, name="model.model.norm"), ("layout.shard=2",), "Write the same on every rank"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_what_such_a_loop_is_told(name: str, tmp_path: Path) -> None:
    """One sentence on every rank, and no hang."""
    loop, keys, sentence = TOLD[name]
    world = 2 ** len([key for key in keys if key.startswith("layout")])
    codes = run_script(written(tmp_path, QWEN, loop), tmp_path, *keys, world=world)
    printed = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(world)]
    assert 0 not in codes, printed[0]
    assert any(sentence in each for each in printed), printed[0]


@pytest.mark.slow
def test_shares_may_compute_different_numbers_of_forwards_in_evaluation(tmp_path: Path) -> None:
    """Under ZeRO-3 a forward of a training step gathers; those of an evaluation find all of a rank's parts."""
    path = written(tmp_path, QWEN, SHARE, handed="(loader, Samples())")
    assert run_script(path, tmp_path, *BOTH, world=4) == [0] * 4, (tmp_path / "rank-0.txt").read_text()
