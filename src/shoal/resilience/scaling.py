"""How many replicas should train: a pure function of the policy and of what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.resilience.config import ElasticConfig


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
