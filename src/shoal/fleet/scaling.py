"""How many replicas a run wants from now on, by its policy: the launcher asks the coordinator for them.

Fewer: those that came last stand by after the step. More: those that stand by join between two steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.coordinator.client import Address, Connection
from shoal.errors import EnvironmentFault
from shoal.resilience.config import ElasticConfig
from shoal.resilience.events import Committed, Decision, Formed, Refusal, Scale


def wanted_replicas(
    config: ElasticConfig, present: int, *, samples_per_s: Mapping[int, float], price: float | None = None
) -> int:
    """Between `config.min` and `config.max`.

    `samples_per_s` is what was measured, by number of replicas. Under "throughput", one more than `present` is wanted
    while the last one that came brought `min_gain` of the speed per replica before it. Raises `ValueError` under
    "price" without a price.
    """
    if config.policy == "available":
        return config.max
    if config.policy == "price":
        if price is None or config.price_limit is None:
            raise ValueError("the present price is not known: write it to the file that elastic.price_file names")
        return config.max if price <= config.price_limit else config.min
    now, before = samples_per_s.get(present), samples_per_s.get(present - 1)
    wanted = present
    if now is not None and before is not None and now - before < config.min_gain * before / (present - 1):
        wanted = present - 1
    elif (
        now is not None and samples_per_s.get(present + 1, now + now / present) - now >= config.min_gain * now / present
    ):
        wanted = present + 1
    return min(config.max, max(config.min, wanted))


POLL_S = 2.0
MEASURED_STEPS = 20
"""Steps of a generation that its speed is measured by; the first ones, which warm up, do not count."""
WARMUP_STEPS = 5
MOST_BYTES = 64


def price_in(file: Path) -> float:
    """The present price of a replica's hour. Raises `EnvironmentFault` where `file` holds no number."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise EnvironmentFault(
            f"elastic.price_file: {file} cannot be read ({error.strerror}): write the present price to it, a number"
        ) from error
    text, price = content.decode("utf-8", "replace").strip(), math.nan
    if len(content) <= MOST_BYTES:
        with suppress(ValueError):
            price = float(text)
    if not (math.isfinite(price) and price >= 0):
        raise EnvironmentFault(f"elastic.price_file: {file} holds {text[:20]!r}: write the present price, a number")
    return price


class Speeds:
    """Samples a second by the number of replicas, from the coordinator's decisions."""

    def __init__(self, global_samples: int) -> None:
        self._samples = global_samples
        self.measured: dict[int, float] = {}
        self.present = 0
        self._steps, self._since_s = 0, 0.0

    def heard(self, decision: Decision, now_s: float) -> None:
        """What the coordinator has decided; `now_s` is any clock that never goes back."""
        match decision:
            case Formed(_, members):
                self.present, self._steps = len(members), 0
            case Committed():
                self._steps += 1
                if self._steps == WARMUP_STEPS:
                    self._since_s = now_s
                elif self._steps == WARMUP_STEPS + MEASURED_STEPS and now_s > self._since_s:
                    self.measured[self.present] = MEASURED_STEPS * self._samples / (now_s - self._since_s)
            case _:
                pass


@contextmanager
def scaling(
    config: ElasticConfig, address: Address, speeds: Speeds, *, say: Callable[[str], object], poll_s: float = POLL_S
) -> Iterator[None]:
    """Until the end of the block the coordinator at `address` is asked for as many replicas as the policy wants.

    Raises `EnvironmentFault` where the price is not known at the start; later the last one counts, and `say` hears it.
    """
    if config.policy == "available":
        yield
        return
    over = threading.Event()
    policy = _Policy(config, address, speeds, say)
    policy.begin()

    def watch() -> None:
        while not over.wait(poll_s):
            policy.look()

    thread = threading.Thread(target=watch, name="shoal-scaling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Policy:
    def __init__(self, config: ElasticConfig, address: Address, speeds: Speeds, say: Callable[[str], object]) -> None:
        self._config, self._address, self._speeds, self._say = config, address, speeds, say
        self._wanted, self._price, self._complained = config.max, 0.0, False

    def begin(self) -> None:
        """The first look; under "throughput" the run begins with the fewest replicas, and grows while that pays."""
        if self._config.policy == "throughput" and self._ask(self._config.min):
            self._wanted = self._config.min
        self.look(first=True)

    def look(self, *, first: bool = False) -> None:
        """Asks for another number where the policy wants one."""
        config, speeds = self._config, self._speeds
        if config.price_file is not None:
            try:
                self._price, self._complained = price_in(Path(config.price_file)), False
            except EnvironmentFault as error:
                if first:
                    raise
                if not self._complained:
                    self._complained = True
                    self._say(f"{error}; until then the last one counts, {self._price:g}")
        present = speeds.present or config.max
        if config.policy == "throughput" and present != self._wanted:
            return  # what was asked for last has not come about, or is not there yet
        wanted = wanted_replicas(config, present, samples_per_s=speeds.measured, price=self._price)
        if wanted != self._wanted and self._ask(wanted):
            why = f"the price is {self._price:g}, and elastic.price_limit {config.price_limit}"
            if config.policy == "throughput":
                rates = ", ".join(f"{rate:.3g} with {count}" for count, rate in sorted(speeds.measured.items()))
                why = f"samples a second were {rates}"
            self._say(f"{wanted} replicas from now on: {why}")
            self._wanted = wanted

    def _ask(self, wanted: int) -> bool:
        try:
            connection = Connection(self._address)
            try:
                return not isinstance(connection.ask(Scale(wanted)), Refusal)
            finally:
                connection.close()
        except (OSError, EnvironmentFault):
            return False  # asked again at the next look
