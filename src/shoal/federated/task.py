"""`Task`: what clients train and how, put together from the run file's tables by whoever builds models and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from shoal.federated.upload import Upload


@dataclass(frozen=True)
class Task:
    """`model` are the first parameters [numel]. `rate` gives the learning rate of a round, from 1; `batch` is the
    samples of a local step, `rounds` how many models are made. `together`: clients that train at once."""

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
