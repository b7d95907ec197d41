"""Flower's strategies and client apps (flwr, its message API) under Shoal's rounds, as they are.

A client app is called with the model of the round as an `ArrayRecord` of the module's state dict, and with the
strategy's `ConfigRecord`; the arrays of its reply are the client's new model, the numbers of its `MetricRecord` its
figures. An app made of a `client_fn` and a `NumPyClient` is called for `fit`. Its context says `partition-id` and
`num-partitions`, and keeps its state as long as the process lives.

A strategy configures and aggregates. What stays Shoal's: who takes part (its `fraction_train` is not looked at), when a
round ends, what a server keeps over its restart, evaluation (of the app `train` alone is called), screening, privacy of
samples. Of the strategy, numbers and arrays that are its attributes are kept, and survive a restart.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, EnvironmentFault, MissingExtra, UserCodeError
from shoal.federated.config import FederatedConfig
from shoal.federated.local_training import LocalTrainer
from shoal.federated.strategy import Plan, Setting, Strategy, Update

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy as TheirStrategy
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise MissingExtra("flwr", extra="flower", purpose="Flower's strategies and client apps") from error

ARRAYS, CONFIG, METRICS, EXAMPLES = "arrays", "config", "metrics", "num-examples"
RUN, SERVER_NODE = 1, 1
"""What messages say of a run that no SuperLink has numbered."""


class FlowerStrategy(Strategy):
    """`theirs`: the strategy. `kept` has its numbers and arrays, by attribute and key."""

    def __init__(self, config: FederatedConfig, trainer: LocalTrainer, theirs: TheirStrategy) -> None:
        super().__init__(config, trainer.layout.numel)
        least = getattr(theirs, "min_available_nodes", 0)
        if least > config.clients:
            raise ConfigError(
                f"the Flower strategy waits for min_available_nodes = {least}, and federated.clients is "
                f"{config.clients}: lower it there, or raise that"
            )
        _identify()
        self._trainer, self._theirs = trainer, theirs
        self._settings: dict[str, Setting] = {}

    def begin(self, model: Tensor, *, version: int) -> None:
        """Lets the strategy configure the round."""
        self._restore()
        config = ConfigRecord()
        arrays = ArrayRecord(_state_of(self._trainer, model))
        asked = self._theirs.configure_train(version + 1, arrays, config, _Nodes(self.config.clients))
        records = [record for message in asked for record in message.content.config_records.values()]
        self._settings = _settings_of(records[0] if records else config)
        self._keep()

    def configure(self) -> Plan:
        return Plan(settings=self._settings)

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        """Raises `EnvironmentFault` where the strategy makes no model."""
        self.begin(model, version=version)
        replies = [self._reply(model, update, number) for number, update in enumerate(updates)]
        arrays, _ = self._theirs.aggregate_train(version + 1, replies)
        if arrays is None:
            raise EnvironmentFault(f"the Flower strategy {type(self._theirs).__name__} made no model of the updates")
        self._keep()
        state = arrays.to_torch_state_dict()
        layout = self._trainer.layout
        return torch.cat([state[name].reshape(-1).to(model.dtype) for name in layout.names])

    def _reply(self, model: Tensor, update: Update, node: int) -> Message:
        said = {name.removesuffix("/train"): value for name, value in update.metrics.items()}
        metrics = MetricRecord({EXAMPLES: float(update.samples), **said})
        arrays = ArrayRecord(_state_of(self._trainer, model + update.delta))
        return _reply_of(RecordDict({ARRAYS: arrays, METRICS: metrics}), node)

    def _keep(self) -> None:
        self.kept = {name: torch.as_tensor(np.array(value)) for name, value in _attributes(self._theirs)}

    def _restore(self) -> None:
        """Gives the strategy back what was kept; what is in no attribute begins anew."""
        for name, tensor in self.kept.items():
            attribute, _, key = name.partition("/")
            before = getattr(self._theirs, attribute, None)
            if key:
                arrays = before if isinstance(before, dict) else {}
                setattr(self._theirs, attribute, {**arrays, key: tensor.numpy().copy()})
            elif isinstance(before, int | float):
                setattr(self._theirs, attribute, type(before)(tensor.item()))
            else:
                setattr(self._theirs, attribute, tensor.numpy().copy())


def client_of(app: ClientApp, clients: int) -> Callable[..., dict[str, float]]:
    """A client app as a `train` function, for a run with so many clients."""
    contexts: dict[str, Context] = {}
    _identify()

    def train(
        model: nn.Module, samples: Any, *, round: int, lr: float, client: str, settings: Mapping[str, Setting]
    ) -> dict[str, float]:
        number = _number_of(client, clients)
        if client not in contexts:
            node = {"partition-id": number, "num-partitions": clients}
            contexts[client] = Context(RUN, number, node, RecordDict(), {})
        call = _called if getattr(app, "_call", None) is None else _fitted
        state, metrics = call(app, model, {"server-round": round, "lr": lr, **settings}, contexts[client])
        model.load_state_dict(state)
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    return train


def _called(
    app: ClientApp, model: nn.Module, config: dict[str, Setting], context: Context
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Calls an app of the message API. Returns its state dict and its metrics."""
    content = RecordDict({ARRAYS: ArrayRecord(OrderedDict(model.state_dict())), CONFIG: ConfigRecord(config)})
    message = Message(content, dst_node_id=context.node_id, message_type=MessageType.TRAIN)
    reply = app(message, context)
    if reply.has_error():
        raise UserCodeError(f"the Flower app of node {context.node_id} failed: {reply.error.reason}")
    arrays = next(iter(reply.content.array_records.values()), None)
    if arrays is None:
        raise UserCodeError("the Flower app replied without an ArrayRecord: its train function returns the new model")
    found = next(iter(reply.content.metric_records.values()), {})
    return arrays.to_torch_state_dict(), dict(found)


def _fitted(
    app: ClientApp, model: nn.Module, config: dict[str, Setting], context: Context
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Calls an app made of a client with `fit`."""
    from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres

    state = model.state_dict()
    asked = FitIns(ndarrays_to_parameters([tensor.numpy().copy() for tensor in state.values()]), dict(config))
    content = fitins_to_recorddict(asked, keep_input=True)
    reply = app(Message(content, dst_node_id=context.node_id, message_type=MessageType.TRAIN), context)
    came = recorddict_to_fitres(reply.content, keep_input=True)
    arrays = parameters_to_ndarrays(came.parameters)
    if len(arrays) != len(state):
        raise UserCodeError(f"the Flower client returned {len(arrays)} arrays, and the model has {len(state)}")
    tensors = {name: torch.from_numpy(array) for name, array in zip(state, arrays, strict=True)}
    return tensors, {EXAMPLES: came.num_examples, **came.metrics}


class _Nodes(Grid):
    """What a strategy sees of its clients: how many there are. It sends nothing."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    def set_run(self, run: Any) -> None:
        raise self._refused("set_run")

    def get_node_ids(self) -> list[int]:
        return list(range(self._clients))

    @property
    def run(self) -> Any:
        raise self._refused("run")

    def create_message(self, *_: Any, **__: Any) -> Any:
        raise self._refused("create_message")

    def push_messages(self, *_: Any, **__: Any) -> Any:
        raise self._refused("push_messages")

    def pull_messages(self, *_: Any, **__: Any) -> Any:
        raise self._refused("pull_messages")

    def send_and_receive(self, *_: Any, **__: Any) -> Any:
        raise self._refused("send_and_receive")

    def _refused(self, method: str) -> UserCodeError:
        return UserCodeError(
            f"the Flower strategy calls grid.{method}: here Shoal's rounds carry models and updates, and a strategy "
            "configures and aggregates"
        )


def _identify() -> None:
    """Messages can be made only in a process that knows its task: says which, where Flower has not."""
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = RUN, RUN, SERVER_NODE


def _state_of(trainer: LocalTrainer, vector: Tensor) -> OrderedDict[str, Tensor]:
    """The module's state dict with the parameters in `vector`."""
    views = trainer.layout.views(vector)
    state: dict[str, Tensor] = trainer.module.state_dict()
    return OrderedDict((name, views.get(name, tensor)) for name, tensor in state.items())


def _reply_of(content: RecordDict, node: int) -> Message:
    asked = Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN)
    return Message(content, reply_to=asked)


def _settings_of(config: ConfigRecord) -> dict[str, Setting]:
    """What clients are told. Raises `ConfigError` for bytes and lists, which a plan does not carry."""
    for name, value in config.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"the Flower strategy tells clients {name} = {value!r}: only single values can be told")
    return dict(config.items())  # type: ignore[arg-type]


def _attributes(strategy: TheirStrategy) -> Iterator[tuple[str, Any]]:
    """Numbers and arrays among the attributes of a strategy; those of dicts as `attribute/key`."""
    for name, value in vars(strategy).items():
        if isinstance(value, np.ndarray | float) or (isinstance(value, int) and not isinstance(value, bool)):
            yield name, value
        elif isinstance(value, dict) and value and all(isinstance(one, np.ndarray) for one in value.values()):
            yield from ((f"{name}/{key}", array) for key, array in value.items())


def _number_of(client: str, clients: int) -> int:
    """Which part of the data a client's name stands for: its digits at the end."""
    digits = client[len(client.rstrip("0123456789")) :]
    return int(digits) % clients if digits else 0
