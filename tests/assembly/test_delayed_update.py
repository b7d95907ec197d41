"""Updates that the host makes beside the next step: the naive sequence to the bit, checkpoints, and refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.assembly.run import Run, open_run
from shoal.engine.rank_context import RankContext
from shoal.engine.transforms import clip_by_global_norm
from shoal.engine.updates import AtOnce, Outcome, Work
from shoal.errors import ConfigError
from shoal.launcher.environment import Place
from shoal.optim.build import set_rate
from shoal.runfile.rules import refusal
from tests.assembly.journey import Leg, travel
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of

MODEL = GPT | {"layers": 4, "width": 96, "feed_forward_width": 192}
PART = {"part": "16 KiB", "pool": "64 KiB"}
STEPS, CLIP = 6, 0.5
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "copies": {"layout": {"replicate": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "ZeRO-2": {"layout": {"shard": 2}, "memory": {"zero": 2}},
    "ZeRO-3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "pipeline": {"layout": {"pipeline": 2}, "batch": {"micro_samples": 2}},
    "bfloat16 weights": {"layout": {"replicate": 2}, "precision": {"kind": "bfloat16_params"}},
}
CASES = [(layout, "host") for layout in LAYOUTS] + [("one process", "disk"), ("ZeRO-3", "disk")]


class NaivelyLate(AtOnce):
    """The same sequence in the plainest way: two copies of the weights, and every update at once."""

    def __init__(self, run: Run, after: int) -> None:
        optimizer = run.state.optimizer.optimizer
        super().__init__(
            run.generation.gradients, optimizer, transforms=[clip_by_global_norm(CLIP)], seen=True, votes_ahead=False
        )
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._newest: list[Tensor] | None = None
        self._after = after

    @torch.no_grad()
    def update(self, context: RankContext, work: Work) -> Outcome:
        agreed = self.agree(context, work)
        shown = [p.clone() for p in self._weights] if self._newest is None else self._newest
        self._put(shown)
        set_rate(self._optimizer, work.lr)
        self._optimizer.step()
        self._newest = [p.clone() for p in self._weights]
        if work.step > self._after:
            self._put(shown)
        return self.conclude(context, agreed)

    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._weights, values, strict=True):
            parameter.copy_(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("delayed")
    corpus(folder)
    return folder


def tables(layout: str, offload: dict[str, Any]) -> dict[str, Any]:
    own = LAYOUTS[layout]
    memory = {**own.get("memory", {}), "offload": {**offload, **PART}}
    return {
        **own,
        "model": MODEL,
        "batch": {"sequence": 64, **own.get("batch", {})},
        "memory": memory,
        "optimizer": {"kind": "adamw", "clip_norm": CLIP},
    }


def trained(
    place: TestPlace, given: dict[str, Any], folder: str, naive_after: int | None = None
) -> tuple[list[float], dict[str, float]]:
    """The losses of `STEPS` steps, of which the third has three times the rate, and the last one's figures."""
    run_file = run_file_of(Path(folder), **given)
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    step = run.step if naive_after is None else run.step.by(NaivelyLate(run, naive_after))
    losses, figures = [], {}
    with closing(run.feed()) as feed:
        for number in range(1, STEPS + 1):
            fed = feed.next()
            losses.append(step(number, fed.microbatches, lr=6e-3 if number == 3 else 2e-3).loss)
            run.state.progress.advance(fed.interval)
            figures = run.tiers.take_figures()
    run.end()
    return losses, figures


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "home"), CASES)
def test_losses_are_those_of_the_naive_sequence_to_the_bit(ranks, folder: Path, layout: str, home: str) -> None:
    """With a step at another rate in between; the naive one takes its state as it comes, on the device."""
    world = 1 if layout == "one process" else 2
    for after in (0, 2):
        delayed = tables(layout, {"optimizer": home, "delay_update_after": after})
        found = ranks(world, trained, delayed, str(folder))
        naive = ranks(world, trained, tables(layout, {}), str(folder), after)
        assert [losses for losses, _ in found] == [losses for losses, _ in naive]
        exact = ranks(world, trained, tables(layout, {}), str(folder))
        assert [losses for losses, _ in found] != [losses for losses, _ in exact]


@pytest.mark.slow
def test_the_device_holds_no_state_and_gradients_and_weights_alone_move(ranks, folder: Path) -> None:
    """Peak and moved bytes of a simulated device, beside those of the exact update."""
    counted = {"memory": {"simulate_device": "1 GiB"}}
    found = {}
    for name, offload in {
        "plain": {},
        "exact": {"optimizer": "host"},
        "delayed": {"optimizer": "host", "delay_update_after": 0},
    }.items():
        given = tables("one process", offload)
        given["memory"] |= counted["memory"]
        ((_, found[name]),) = ranks(1, trained, given, str(folder))
    assert found["delayed"]["memory/device_peak_bytes"] <= found["exact"]["memory/device_peak_bytes"]
    assert found["delayed"]["memory/to_host_bytes"] == found["delayed"]["memory/to_device_bytes"]
    assert 2 * found["delayed"]["memory/to_host_bytes"] == pytest.approx(
        found["exact"]["memory/to_host_bytes"], rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_a_run_goes_on_to_the_bit_under_another_layout_and_home(ranks, folder: Path, after: int) -> None:
    """What the host has made of an update is in the checkpoint, and weights that lack it."""
    name = f"journey-{after}"
    on_host, on_disk = ({"optimizer": home, "delay_update_after": after} for home in ("host", "disk"))
    straight: Leg = ranks(1, travel, tables("one process", on_host), str(folder), f"straight-{after}", 8)[0]
    legs: list[Leg] = [
        ranks(1, travel, tables("one process", offload), str(folder), name, steps)[0]
        for offload, steps in ((on_host, 2), (on_disk, 3), (on_host, 3))
    ]
    assert [loss for leg in legs for loss in leg.losses] == straight.losses
    for key, value in straight.left.items():
        assert value.equal(legs[-1].left[key]), key
    assert any(key.startswith("optimizer/next_weight/") for key in straight.left)
    further: Leg = ranks(2, travel, tables("ZeRO-3", on_disk), str(folder), name, 1)[0]
    for key, value in straight.left.items():
        assert value.equal(further.came[key]), key


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "on the device": ({"memory": {"offload": {"delay_update_after": 0}}}, "with the optimizer on the device"),
    "mapped": (
        {"memory": {"offload": {"delay_update_after": 0, "optimizer": "disk", "parameters": "disk"}}},
        "with parameters on disk",
    ),
    "masks": (
        {
            "memory": {"offload": {"delay_update_after": 0, "optimizer": "host"}},
            "sparsity": {"kind": "rigl", "density": 0.5},
        },
        "with [sparsity]",
    ),
    "a thaw": (
        {
            "memory": {"offload": {"delay_update_after": 0, "optimizer": "host"}},
            "freeze": {"later": [{"layers": ["blocks.0"], "at": 2, "until": 4}]},
        },
        "with [freeze]",
    ),
    **{
        kind: (
            {
                "memory": {"offload": {"delay_update_after": 0, "optimizer": "host"}},
                "layout": {"replicate": 2},
                "sync": {"kind": kind, **keys},
            },
            f'with sync.kind = "{kind}", which writes weights between two steps',
        )
        for kind, keys in {"local": {"period": 2}, "gossip": {}, "easgd": {}, "streaming": {}}.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_with_it_is_refused(tmp_path: Path, case: str) -> None:
    given, said = REFUSED[case]
    sentence = refusal(run_file_of(tmp_path, **given))
    assert sentence is not None
    assert "delay_update_after" in sentence
    assert said in sentence


@pytest.mark.slow
def test_a_run_without_it_does_not_take_up_an_update_under_way(ranks, folder: Path) -> None:
    """One sentence names the slot; the other way round works."""
    delayed, exact = {"optimizer": "host", "delay_update_after": 0}, {"optimizer": "host"}
    ranks(1, travel, tables("one process", delayed), str(folder), "back", 2)
    with pytest.raises(AssertionError, match="optimizer state 'next_weight'"):
        ranks(1, travel, tables("one process", exact), str(folder), "back", 1)
    ranks(1, travel, tables("one process", exact), str(folder), "forth", 2)
    ranks(1, travel, tables("one process", delayed), str(folder), "forth", 2)


def test_a_loop_of_a_script_is_refused(folder: Path) -> None:
    from torch._C._distributed_c10d import HashStore

    given = tables("one process", {"optimizer": "host", "delay_update_after": 0})
    run = open_run(run_file_of(folder, **given), Place(0, 1, 0, 1, 0, "shoal"), store=HashStore())
    with pytest.raises(ConfigError, match="in a loop of the script's own"):
        run.tiers.check_own_loop()
    run.end()
