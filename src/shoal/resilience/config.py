"""Table `[elastic]`: how many replicas train, and what decides it. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.check import Positive, PositiveFloat, Table, says

COORDINATOR = "SHOAL_COORDINATOR"
"""The variable that names the coordinator of an elastic run on several hosts, as HOST:PORT."""


class ElasticConfig(Table, frozen=True):
    """Replicas may come and go while the run trains."""

    min: Annotated[Positive, says("Fewest replicas that train; with fewer the run waits.")] = 1
    max: Annotated[
        Positive, says("Most replicas that train; the launcher starts as many, or those of `run.processes`.")
    ] = 1
    spares: Annotated[
        int, says("Replicas beside `max` that stand by, with everything loaded, to take a lost one's place.", ge=0)
    ] = 0
    policy: Annotated[
        Literal["available", "throughput", "price"],
        says(
            "What decides between min and max: all that are there; those that make the run faster by `min_gain`; "
            "or max while the price is at most `price_limit`, else min. Fewer than are there: the rest stand by. Hosts "
            "with a coordinator of their own know the first alone."
        ),
    ] = "available"
    min_gain: Annotated[
        float, says("throughput: the share of a replica's own speed that one more must bring.", gt=0, le=1)
    ] = 0.5
    price_limit: Annotated[PositiveFloat | None, says("price: highest price of a replica's hour.")] = None
    price_file: Annotated[str | None, says("price: file that holds the present price, a number.")] = None
    silence_s: Annotated[float, says("Seconds without a heartbeat after which a rank is lost.", ge=1)] = 5.0
    hang_s: Annotated[
        float,
        says(
            "Seconds for which a rank may keep others waiting in a collective, without progress of its own, before "
            "its replica is fenced; 0: for ever.",
            ge=0,
        ),
    ] = 45.0
    accept_s: Annotated[float, says("Seconds that a replica may need to the end of its step.", ge=1)] = 300.0
    wait_s: Annotated[
        float,
        says(
            "Seconds with fewer than `min` replicas after which the run ends with exit 3; more than `accept_s`.", ge=1
        ),
    ] = 600.0
    retries: Annotated[
        int, says("Replicas that are started again in a row, without a step between, before the run ends.", ge=0)
    ] = 3
    fingerprint_every_steps: Annotated[
        int,
        says("Every how many steps replicas compare fingerprints of parameters and optimizer state; 0: never.", ge=0),
    ] = 100

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min = {self.min} is more than max = {self.max}: lower min or raise max")
        if self.wait_s <= self.accept_s:
            raise ValueError(
                f"wait_s = {self.wait_s:g} with accept_s = {self.accept_s:g}: replicas would give up before one that "
                "does not answer is fenced; raise wait_s above accept_s"
            )
        priced = self.price_limit is not None and self.price_file is not None
        if self.policy == "price" and not priced:
            raise ValueError('policy = "price" compares a price with a limit: set price_limit and price_file')
        if self.policy != "price" and (self.price_limit is not None or self.price_file is not None):
            raise ValueError(f'policy = "{self.policy}" looks at no price: remove the price keys, or policy = "price"')
