"""`memory.budget`: the cheapest mixture that fits, measured before any rank starts; what was chosen is written down.

`shoal.planning.mixture_search` says which of the mixtures are tried: each by three steps of the run itself on a
simulated device that refuses nothing.

The peak of a trial is that of every later step where what a step allocates does not depend on its data. Where it does,
as experts get other numbers of tokens, the later steps of a trial differ: what they differ by is asked for once more.
The run is then held to the budget by the same ledger.

The choice lies in `memory.json` of the run directory, with the bill: ranks read it, and a run that goes on keeps it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from blake3 import blake3

from shoal import units
from shoal.checkpoint.config import CheckpointConfig
from shoal.config.load import dumps
from shoal.errors import ConfigError, LayoutError, ShoalError
from shoal.files import cache_folder, read_json
from shoal.launcher.children import interrupted_by_sigterm
from shoal.launcher.devices import gpus, memory_limit
from shoal.launcher.environment import Place
from shoal.memory.config import BudgetChange
from shoal.observe.config import ObserveConfig
from shoal.observe.facts import replace_file
from shoal.observe.terminal import ProgressBar
from shoal.planning.mixture_prices import Prices, cheapest, said_of
from shoal.planning.mixture_search import Search, Trial, Tried, held, need
from shoal.planning.mixtures import AS_IT_IS, allowed_by, with_values
from shoal.planning.trial import trial_of
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory

FILE_NAME = "memory.json"
MOST_BYTES = 1 << 20


class Bill(msgspec.Struct, frozen=True):
    """What was tried for a budget, of a run file whose `digest` says which; the last one is what the run uses.
    `unpriced`: why the planner could not say what a mixture needs; "" where it could.
    """

    budget: str
    digest: str
    tried: list[Tried]
    unpriced: str = ""


def with_budget(
    run_file: RunFile,
    place: Place | None,
    *,
    keeps: bool = True,
    trial: Trial | None = None,
    bar: ProgressBar | None = None,
) -> tuple[RunFile, str]:
    """The run file with the mixture, and a sentence on it. `place` is None in the process that starts the ranks. Unless
    it `keeps` something, a bill that the run directory does not have lies in the cache folder. `trial` tries a mixture;
    None: by `first_steps` in processes of their own. `bar` hears what is priced and tried.

    Raises `ConfigError` where nothing can be tried, `LayoutError` where nothing fits.
    """
    digest = digest_of(run_file)
    own, apart = run_directory(run_file) / FILE_NAME, cache_folder(os.environ) / "budgets" / f"{digest[:16]}.json"
    for path in (own,) if keeps else (own, apart):
        if (bill := _kept(path)) is not None and bill.digest == digest:
            return chosen_by(bill, run_file), said(bill)
    if place is not None:
        raise ConfigError(
            f"memory.budget under {place.launcher}: what fits is tried once, by whoever starts the ranks; start "
            "the run with shoal train, or write the keys that its run.toml has"
        )
    with interrupted_by_sigterm():
        _check(run_file)
        bill = _tried(run_file, digest, Search(run_file, trial or trial_of, bar or ProgressBar()))
    path = own if keeps else apart
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(bill) + b"\n")
    return chosen_by(bill, run_file), said(bill)


def foreseen(run_file: RunFile, cluster: Path | None) -> str | None:
    """For `shoal plan`, of a run file whose number of processes is known: what the run directory has already, or what
    is predicted on the devices of a cluster's file; None: there is no budget.
    """
    if run_file.memory.budget is None:
        return None
    bill, asked = _kept(run_directory(run_file) / FILE_NAME), f'memory.budget = "{run_file.memory.budget}"'
    if cluster is None and bill is not None and bill.digest == digest_of(run_file):
        return f"{said(bill)}; kept from {run_directory(run_file) / FILE_NAME}"
    try:
        prices = Prices(run_file, cluster)
    except ShoalError as why:
        return f"{asked}: nothing is predicted, and mixtures are tried when the run starts: {why}"
    plain, best = prices.of(AS_IT_IS), cheapest(run_file, prices)
    if plain is None or best is None:
        return (
            f"{asked}: by prediction, no mixture fits; a start tries those that need least, and says what they come to"
        )
    mixture, price = best
    if mixture == AS_IT_IS:
        return f"{asked}, as predicted: the run as it is fits, and needs {units.memory_size(price.size_bytes)}"
    return (
        f"{asked}, as predicted: {mixture.said} needs {units.memory_size(price.size_bytes)} (as it is "
        f"{units.memory_size(plain.size_bytes)}), {said_of(price, plain)}; {_CHANGED[mixture.change]}"
    )


def used_by(run_file: RunFile) -> str:
    """The sentence on the budget by which a run that starts was completed; "" where it has none, or a bill that is not
    of this version.
    """
    try:
        bill = _kept(run_directory(run_file) / FILE_NAME)
    except ConfigError:
        return ""
    if bill is None or bill.budget != run_file.memory.simulate_device:
        return ""
    return said(bill) if with_values(run_file, bill.tried[-1].values) == run_file else ""


def chosen_by(bill: Bill, run_file: RunFile) -> RunFile:
    """The run file with what the run uses, held to the budget."""
    return held(run_file, bill.tried[-1].values, run_file.memory.budget)


def said(bill: Bill) -> str:
    """What is used, and what was tried beside it."""
    *others, used = bill.tried
    beside = f" ({'; '.join(map(need, others))})" if others else ""
    longer = "" if not used.longer else f", about {100 * used.longer:+.0f} % of a step"
    return f'memory.budget = "{bill.budget}": {need(used)}{longer}; {_CHANGED[used.change]}{beside}'


_CHANGED: dict[BudgetChange, str] = {
    "nothing": "losses keep every bit",
    "rounding": "sums have another order, so that losses differ by rounding",
    "moments": "the optimizer's moments have 8 bits",
}


def _tried(run_file: RunFile, digest: str, search: Search) -> Bill:
    allowed = allowed_by(run_file)
    if (
        search.as_it_is()
        or any(search.fits(change, longest_s) for change, longest_s in search.rounds(allowed))
        or search.descends(allowed)
    ):
        return Bill(run_file.memory.budget or "", digest, search.tried, search.unpriced)
    raise LayoutError(search.short())


def _check(run_file: RunFile) -> None:
    """Raises `ConfigError` where nothing can be tried, or the budget is not one."""
    memory, budget = run_file.memory, run_file.memory.budget_bytes or 0
    if run_file.run.device == "cuda" or (run_file.run.device == "auto" and gpus(os.environ)):
        raise ConfigError(
            'memory.budget is tried on CPUs, by a simulated device: set run.device = "cpu", or choose with shoal plan'
        )
    limit = memory_limit()
    if limit is not None and budget > limit.total_bytes:
        raise ConfigError(
            f'memory.budget = "{memory.budget}" is more than the {units.memory_size(limit.total_bytes)} that '
            f"{limit.limited_by} has: a budget says what a rank may hold of it; lower it, or leave it out"
        )
    if (why := refusal(held(run_file, {}, memory.budget))) is not None:
        raise ConfigError(f"memory.budget needs a simulated device: {why}")


def digest_of(run_file: RunFile) -> str:
    """Of what decides the peak: all but how long it runs, what it keeps, and what it tells."""
    run = msgspec.structs.replace(run_file.run, steps=1, name="", directory=None)
    noise = {key: getattr(run_file.observe, key) for key in ("noise_every_steps", "noise_by_layer")}
    observe = msgspec.structs.replace(ObserveConfig(), **noise)
    own = msgspec.structs.replace(run_file, run=run, checkpoint=CheckpointConfig(), observe=observe)
    return blake3(dumps(own).encode()).hexdigest()


def _kept(path: Path) -> Bill | None:
    if not path.is_file():
        return None
    return read_json(path, Bill, limit_bytes=MOST_BYTES, error=ConfigError, repair="remove it; it is written anew")
