"""What mixtures are predicted to need, beside what runs of them need, and budgets that real trials meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.memory.config import BudgetChange
from shoal.models.build import build, parameter_count
from shoal.models.config import GPTConfig
from shoal.models.roles import Role
from shoal.planner.trace.predictor import TracedPredictor
from shoal.planning.memory_budget import FILE_NAME, Bill, with_budget
from shoal.planning.mixture_prices import ROOM, Prices, _neighbours, cheapest
from shoal.planning.mixtures import AS_IT_IS, BOUNDLESS, CHANGES, RECOMPUTE, WORTH, Mixture, mixtures, with_values
from shoal.planning.trial import FirstSteps, trial_of
from shoal.runfile.run_file import RunFile
from tests.verification.layouts import corpus, run_file_of

DEEP: dict[str, Any] = {"kind": "gpt", "vocabulary": 61, "layers": 6, "width": 64, "heads": 4}
NEAR, ABOVE = 0.02, 0.1
"""How much larger a peak may be than the predicted one where blocks are unequal, as a share, and how much smaller. The
prediction adds up gradients of three neighbours and the largest temporary, which is a gradient of the largest block:
here these are not on the device at the same time.
"""


def budgeted(folder: Path, budget: str | None, *, processes: int = 1, **tables: Any) -> RunFile:
    """A GPT of six layers on tokens, or what `tables` say."""
    given = {"model": DEEP, "batch": {"sequence": 64}, **tables}
    memory = given.pop("memory", {}) | ({} if budget is None else {"budget": budget})
    return run_file_of(folder, **given, memory=memory, run={"processes": processes, "device": "cpu"})


def ran(run_file: RunFile) -> FirstSteps:
    """Its first steps, on a device that refuses nothing."""
    found = trial_of(with_values(run_file, {"memory.budget": None, "memory.simulate_device": BOUNDLESS}))
    assert isinstance(found, FirstSteps), found
    return found


def bill_of(run_file: RunFile) -> Bill:
    """What was tried."""
    return msgspec.json.decode((Path(run_file.run.directory or "") / FILE_NAME).read_bytes(), type=Bill)


def every_mixture(run_file: RunFile, prices: Prices, change: BudgetChange) -> Iterator[Mixture]:
    """All that change so much, and no more; behind those that compute whole blocks again, what keeps some of them."""
    for one in mixtures(run_file, change):
        yield one
        if RECOMPUTE["full"] in one.means and (other := prices.keeping_some(one)) is not None:
            yield other


def keeping(run_file: RunFile) -> tuple[Prices, list[Mixture]]:
    """The mixtures that keep some of what blocks save."""
    prices = Prices(run_file)
    every = every_mixture(run_file, prices, "nothing")
    return prices, [one for one in every if "memory.recompute_budget" in one.values]


def test_what_blocks_may_keep_fills_the_room_that_whole_blocks_leave(tmp_path: Path) -> None:
    """By the predicted peak; a step lies between that of whole blocks and that without recomputation."""
    plain = Prices(budgeted(tmp_path, None)).of(AS_IT_IS)
    assert plain is not None
    budget = int(0.7 * plain.size_bytes)
    prices, found = keeping(budgeted(tmp_path, f"{budget} B"))
    assert found
    for one in found:
        own, full, none = (
            prices.of(other) for other in (one, one.recomputing(RECOMPUTE["full"]), one.recomputing(None))
        )
        assert own is not None
        assert full is not None
        assert none is not None
        assert 0.97 * ROOM * budget < own.size_bytes < 1.01 * ROOM * budget
        assert full.size_bytes < own.size_bytes < none.size_bytes
        assert none.step_s < own.step_s < full.step_s


def test_what_keeps_more_is_weaker(tmp_path: Path) -> None:
    """Beside the fixed lists, by what the planner says that they keep."""
    plain = Prices(budgeted(tmp_path, None)).of(AS_IT_IS)
    assert plain is not None
    seen = set[float]()
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        prices, found = keeping(budgeted(tmp_path, f"{int(share * plain.size_bytes)} B"))
        for one in found:
            own, fixed = prices.of(one), prices.of(one.recomputing(RECOMPUTE["operators"]))
            assert own is not None
            assert fixed is not None
            seen.add(one.strengths["recompute"])
            weaker = one.strengths["recompute"] < RECOMPUTE["operators"].strength
            assert weaker == (own.size_bytes > fixed.size_bytes)
    assert len(seen) > 1


def test_neighbours_are_those_that_have_most() -> None:
    """Beside what is in no block, which does not move."""
    assert _neighbours([0.1, 0.2, 0.4, 0.1], 2) == pytest.approx(0.2 + 0.6)
    assert _neighbours([0.1, 0.2, 0.4, 0.1], 3) == pytest.approx(0.2 + 0.7)
    assert _neighbours([0.5, 0.5], 3) == pytest.approx(1.0)
    assert _neighbours([], 2) == 1.0


class Unequal(nn.Module):
    """Blocks of which each is twice as wide as the one before it; from `[batch, 64]` to logits `[batch, 61]`."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.blocks = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.head = nn.Linear(widths[-1], 61)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


class Spans(nn.Module):
    """Unequal blocks on tokens, so that microbatches, blocks and a loss in chunks all free something."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, w), nn.GELU(), nn.Linear(w, 32)) for w in (64, 256)])
        self.head = nn.Linear(32, 61)

    def parameter_roles(self) -> dict[str, Role]:
        """The head's, whose product a loss in chunks divides."""
        head, other = (Role(kind, init=None, decay=True) for kind in ("head", "replicated"))
        return {"head.weight": head, "*": other}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "clip_norm"), [(1.0, None), (0.7, None), (0.4, 1.0), (0.25, None), (0.1, 1.0)])
def test_what_is_not_priced_is_not_the_cheapest(tmp_path: Path, share: float, clip_norm: float | None) -> None:
    """Of a traced model, beside all mixtures priced one by one; and fewer sizes of microbatches are traced."""
    corpus(tmp_path)
    given: dict[str, Any] = {
        "model": {"kind": "python", "build": f"{__name__}:Spans"},
        "optimizer": {"kind": "adamw", "clip_norm": clip_norm},
        "batch": {"global_samples": 16, "sequence": 16},
        "memory": {"budget_may_change": "moments"},
    }
    every = Prices(budgeted(tmp_path, None, **given))
    plain = every.of(AS_IT_IS)
    assert plain is not None
    own = budgeted(tmp_path, f"{int(share * plain.size_bytes) + 1} B", **given)
    prices, oracle = Prices(own), Prices(own)
    found = cheapest(own, prices)
    assert (None if found is None else prices.cost(found[0])) == cost_of_the_cheapest(own, oracle)
    assert traces_of(prices) < traces_of(oracle)


def traces_of(prices: Prices) -> int:
    """That its model was traced."""
    assert isinstance(prices._predictor, TracedPredictor)
    return len(prices._predictor.job.subject._traces)


def cost_of_the_cheapest(run_file: RunFile, prices: Prices) -> tuple[float, int] | None:
    """With a price for every mixture: of the run as it is where it fits, else of what changes least while its step is
    worth that; None: nothing fits.
    """

    def fits(mixture: Mixture) -> bool:
        price = prices.of(mixture)
        return price is not None and price.size_bytes <= own_bytes(run_file)

    of_all = [[prices.cost(one) for one in every_mixture(run_file, prices, change) if fits(one)] for change in CHANGES]
    least, plain = [min(costs) for costs in of_all if costs], prices.cost(AS_IT_IS)
    if fits(AS_IT_IS):
        return plain
    longest_s = WORTH * max(plain[0], min((cost[0] for cost in least), default=0.0))
    return next(iter([*(cost for cost in least if cost[0] <= longest_s), *least]), None)


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Numbers that follow from their place."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((64,), index / 64), index % 61


def points() -> Points:
    """For a run file."""
    return Points()


@pytest.mark.slow
def test_parameters_of_unequal_blocks_are_those_of_the_largest_neighbours(tmp_path: Path) -> None:
    """On the host, of a model that is traced."""
    own = budgeted(
        tmp_path,
        None,
        model={"kind": "python", "build": f"{__name__}:Unequal"},
        data={"kind": "python", "build": f"{__name__}:points"},
        memory={"offload": {"parameters": "host", "optimizer": "host", "part": "64 KiB"}},
    )
    price = Prices(own).of(AS_IT_IS)
    assert price is not None
    assert 1 - ABOVE < ran(own).peak_bytes / price.size_bytes < 1 + NEAR


@dataclass
class Recorded:
    """Real trials, and what they came to."""

    steps: list[FirstSteps] = field(default_factory=list)

    def __call__(self, run_file: RunFile) -> FirstSteps | str:
        found = trial_of(run_file)
        if isinstance(found, FirstSteps):
            self.steps.append(found)
        return found


def own_bytes(run_file: RunFile) -> int:
    """Of its budget."""
    return run_file.memory.budget_bytes or 0


@pytest.mark.slow
def test_what_there_is_room_for_is_kept(tmp_path: Path) -> None:
    """Where that is the cheapest: nearly the whole budget is used, and losses keep every bit."""
    corpus(tmp_path)
    model: dict[str, Any] = {"model": DEEP | {"layers": 3, "width": 96}}
    plain = Prices(budgeted(tmp_path, None, **model)).of(AS_IT_IS)
    assert plain is not None
    own, trials = budgeted(tmp_path, f"{int(0.5 * plain.size_bytes)} B", **model), Recorded()
    with_budget(own, None, trial=trials)
    used = bill_of(own).tried[-1]
    assert used.values["memory.recompute"] == "budget"
    assert used.change == "nothing"
    assert trials.steps[-1].losses == trials.steps[0].losses
    assert 0.85 * own_bytes(own) < trials.steps[-1].peak_bytes <= own_bytes(own)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_state_of_four_times_the_budget_trains_to_the_same_bits(tmp_path: Path, processes: int) -> None:
    """16 bytes for each parameter, divided over the ranks; held to the budget in every step."""
    corpus(tmp_path)
    model = DEEP | {"layers": 24, "width": 96, "feed_forward_width": 256}
    with torch.device("meta"):
        parameters = parameter_count(build(msgspec.convert(model, GPTConfig)))
    own = budgeted(
        tmp_path,
        f"{4 * parameters // processes} B",
        processes=processes,
        model=model,
        batch={"sequence": 16 * processes},
        optimizer={"kind": "adamw", "clip_norm": None},
        memory={"budget_may_change": "nothing"},
    )
    trials = Recorded()
    chosen, _ = with_budget(own, None, trial=trials)
    held = trial_of(chosen)
    assert isinstance(held, FirstSteps), held
    assert held.losses == trials.steps[0].losses
    assert held.peak_bytes <= own_bytes(own)


@pytest.mark.stress
@pytest.mark.parametrize("share", [0.35, 0.5, 0.75])
def test_a_real_budget_is_met(tmp_path: Path, share: float) -> None:
    """A share of the peak: the trial's peak is the run's, as the ledger holds it to that."""
    corpus(tmp_path)
    plain = ran(budgeted(tmp_path, None))
    own = budgeted(tmp_path, f"{int(share * plain.peak_bytes)} B")
    chosen, _ = with_budget(own, None)
    assert not isinstance(trial_of(chosen), str)
