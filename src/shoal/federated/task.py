"""`Task`: what clients train and how, put together from the run file's tables by whoever builds models and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from shoal.data.config import Denominator
from shoal.data.dataset import Dataset
from shoal.federated.config import (
    DeviceConfig,
    FederatedConfig,
    PartitionConfig,
    PrivacyConfig,
    SecureAggregationConfig,
)
from shoal.federated.local_training import LocalTrainer
from shoal.federated.own_training import OwnTraining
from shoal.federated.upload import Upload


@dataclass(frozen=True)
class Task:
    """`model` are the first parameters [numel]. `rate` gives the learning rate of a round, from 1; `batch` is the
    samples of a local step, `rounds` how many models are made. `own`: what a user's functions do."""

    trainer: LocalTrainer
    model: Tensor
    data: Dataset
    denominator: Denominator
    federated: FederatedConfig
    partition: PartitionConfig
    devices: DeviceConfig
    rate: Callable[[int], float]
    batch: int
    rounds: int
    seed: int
    upload: Upload
    shuffle: bool = True
    privacy: PrivacyConfig | None = None
    secure: SecureAggregationConfig | None = None
    own: OwnTraining = field(default_factory=OwnTraining)
