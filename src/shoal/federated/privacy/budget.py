"""The budget: how many rounds it allows, and what they have spent.

client   a round is one step: each client takes part with chance q = cohort / clients
sample   a local step is one: each sample of n is in a batch with chance B / n; the client with the fewest samples
         spends most, and its bound is the run's
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.federated.config import FederatedConfig, PrivacyConfig
from shoal.federated.privacy import prv
from shoal.federated.privacy.rdp import epsilon, most_steps


@dataclass(frozen=True)
class Budget:
    """`chance` and `steps_a_round` are those of whoever spends most."""

    config: PrivacyConfig
    chance: float
    steps_a_round: int = 1

    def spent(self, rounds: int) -> float:
        """Epsilon after so many rounds."""
        steps = rounds * self.steps_a_round
        return epsilon(noise=self.config.noise, chance=self.chance, steps=steps, delta=self.config.delta)

    def rounds(self, wanted: int) -> int:
        """How many of the `wanted` rounds the budget allows. Raises `ConfigError` where it allows none."""
        limit = wanted * self.steps_a_round
        steps = most_steps(
            noise=self.config.noise,
            chance=self.chance,
            delta=self.config.delta,
            budget=self.config.epsilon,
            limit=limit,
        )
        if wanted and steps < self.steps_a_round:
            raise ConfigError(
                f"privacy.epsilon = {self.config.epsilon:g}: the first round would spend {self.spent(1):.3g}; raise "
                "privacy.noise, or the budget"
            )
        return steps // self.steps_a_round

    def facts(self, rounds: int) -> dict[str, float | str]:
        """What a report says; `epsilon` is that which the budget bounds, `epsilon_prv` a tighter bound of the same."""
        return {
            "unit": self.config.unit,
            "epsilon": self.spent(rounds),
            "epsilon_prv": prv.epsilon(
                noise=self.config.noise,
                chance=self.chance,
                steps=rounds * self.steps_a_round,
                delta=self.config.delta,
            ),
            "budget": self.config.epsilon,
            "delta": self.config.delta,
            "noise": self.config.noise,
        }


def client_budget(privacy: PrivacyConfig, federated: FederatedConfig) -> Budget:
    """That of privacy of clients."""
    return Budget(privacy, chance_of(federated))


def sample_budget(privacy: PrivacyConfig, *, batch: int, samples: int, steps: int) -> Budget:
    """That of privacy of samples, for a client of so many `samples` that takes `steps` local steps in a round."""
    return Budget(privacy, min(1.0, batch / samples), steps)


def chance_of(federated: FederatedConfig) -> float:
    """With which chance each client takes part in a round, where that is private."""
    return federated.cohort_size / federated.clients
