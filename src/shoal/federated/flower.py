"""Flower's strategies and client apps (flwr, its message API) under Shoal's rounds, as they are.

A client app is called with the model of the round as an `ArrayRecord` of the module's state dict, and with the
strategy's `ConfigRecord`; the arrays of its reply are the client's new model, the numbers of its `MetricRecord` its
figures. An app made of a `client_fn` and a `NumPyClient` is called for `fit`. Its context says `partition-id` and
`num-partitions`, and keeps its state as long as the process lives.

A strategy configures and aggregates. What stays Shoal's: who takes part (its `fraction_train` is not looked at), when a
round ends, what a server keeps over its restart, evaluation (of the app `train` alone is called), screening, privacy of
samples.

Of the strategy, and of one that it wraps, attributes are kept over a restart: numbers, text, arrays, records, and
lists, tuples and dicts of them. What else an attribute is must be configuration, the same object from the start on. A
strategy with state that cannot be kept is refused.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, EnvironmentFault, MissingExtra, UsageError, UserCodeError
from shoal.federated.config import FederatedConfig
from shoal.federated.local_training import LocalTrainer
from shoal.federated.strategy import RoundPlan, Setting, Strategy, Update

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
    from flwr.app.exception import AppExitException
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy as TheirStrategy
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise MissingExtra("flwr", extra="flower", purpose="Flower's strategies and client apps") from error

ARRAYS, CONFIG, METRICS, EXAMPLES = "arrays", "config", "metrics", "num-examples"
RATE = "lr"
ABOUT = "flower"
"""Which of the kept tensors is the JSON that says where the others belong."""
RUN, SERVER_NODE = 1, 1
"""What messages say of a run that no SuperLink has numbered."""


class FlowerStrategy(Strategy):
    """`theirs`: the strategy. `kept` has its attributes after a round: arrays by number, and the rest as JSON."""

    def __init__(self, config: FederatedConfig, trainer: LocalTrainer, theirs: TheirStrategy) -> None:
        super().__init__(config, trainer.layout.numel)
        _require_enough_nodes(theirs, config.clients)
        _identify()
        self._trainer, self._theirs = trainer, theirs
        self._config = ConfigRecord({RATE: trainer.sgd.lr})
        self._settings: dict[str, Setting] = {}
        self._configured: int | None = None
        self._first = dict(_attributes(theirs))
        self._packed()

    def begin(self, model: Tensor, *, version: int) -> None:
        """Lets the strategy configure the round, once."""
        if self._configured == version:
            return
        if self._configured is None and self.kept:
            self._restore()
        arrays = ArrayRecord(_state_of(self._trainer, model))
        asked = self._theirs.configure_train(version + 1, arrays, self._config, _Nodes(self.config.clients))
        records = [record for message in asked for record in message.content.config_records.values()]
        settings = _settings_of(records or [self._config])
        if settings.get(RATE) == self._trainer.sgd.lr:
            del settings[RATE]  # the strategy leaves the rate to the run file's schedule
        self._settings, self._configured = settings, version

    def configure(self) -> RoundPlan:
        return RoundPlan(settings=self._settings)

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        """Raises `EnvironmentFault` where the strategy makes no model, and `UserCodeError` for what cannot be kept."""
        self.begin(model, version=version)
        replies = [self._reply(model, update, number) for number, update in enumerate(updates)]
        name = type(self._theirs).__name__
        try:
            arrays, _ = self._theirs.aggregate_train(version + 1, replies)
        except AppExitException as error:
            raise EnvironmentFault(
                f"the Flower strategy {name} cannot aggregate what clients replied: {error}"
            ) from error
        if arrays is None:
            raise EnvironmentFault(f"the Flower strategy {name} made no model of the updates")
        self.kept = self._packed()
        state = arrays.to_torch_state_dict()
        layout = self._trainer.layout
        return torch.cat([state[name].reshape(-1).to(model.dtype) for name in layout.names])

    def _reply(self, model: Tensor, update: Update, node: int) -> Message:
        said = {name.removesuffix("/train"): value for name, value in update.metrics.items()}
        metrics = MetricRecord({**said, EXAMPLES: float(update.samples)})
        arrays = ArrayRecord(_state_of(self._trainer, model + update.delta))
        return _reply_of(RecordDict({ARRAYS: arrays, METRICS: metrics}), node)

    def _packed(self) -> dict[str, Tensor]:
        """What is kept. Raises `UserCodeError` for state that cannot be."""
        arrays: list[Tensor] = []
        kept = dict(self._each_packed(arrays))
        about = json.dumps({"attributes": kept, "config": _pack(self._config, arrays)}).encode()
        return {ABOUT: torch.tensor(list(about), dtype=torch.uint8)} | {str(i): one for i, one in enumerate(arrays)}

    def _each_packed(self, arrays: list[Tensor]) -> Iterator[tuple[str, Any]]:
        for name, value in _attributes(self._theirs):
            before = len(arrays)
            try:
                yield name, _pack(value, arrays)
            except _CannotKeep as error:
                del arrays[before:]
                if self._first.get(name) is not value or _is_state(value):
                    raise UserCodeError(
                        f"the Flower strategy keeps {error} in its attribute {name}, which would be lost when the "
                        "server is restarted: keep numbers, text, arrays, and lists and dicts of them"
                    ) from None

    def _restore(self) -> None:
        """Gives the strategy, and the one that it wraps, what was kept."""
        about = json.loads(bytes(self.kept[ABOUT].tolist()))
        for path, packed in about["attributes"].items():
            *wrapped, name = path.split(".")
            owner = self._theirs
            for step in wrapped:
                owner = getattr(owner, step)
            setattr(owner, name, _unpack(packed, self.kept))
        self._config = _unpack(about["config"], self.kept)


def client_of(app: ClientApp, clients: int, *, part: int | None = None) -> Callable[..., dict[str, float]]:
    """A client app as a `train` function, for a run with so many clients. `part`: this client's part of the data; None:
    the number at the end of each client's name."""
    contexts: dict[str, Context] = {}
    _identify()

    def train(
        model: nn.Module, samples: Any, *, round: int, lr: float, client: str, settings: Mapping[str, Setting]
    ) -> dict[str, float]:
        number = _number_of(client, clients, part)
        if client not in contexts:
            node = {"partition-id": number, "num-partitions": clients}
            contexts[client] = Context(RUN, number, node, RecordDict(), {})
        call = _called if getattr(app, "_call", None) is None else _fitted
        state, metrics = call(app, model, {"server-round": round, RATE: lr, **settings}, contexts[client])
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


def _settings_of(records: Sequence[ConfigRecord]) -> dict[str, Setting]:
    """What clients are told. Raises `ConfigError` for bytes and lists, which a plan does not carry, and for nodes that
    are told different things."""
    config = dict(records[0])
    if any(dict(other) != config for other in records[1:]):
        raise ConfigError(
            "the Flower strategy tells its nodes different things: here all clients of a round get one configuration"
        )
    for name, value in config.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"the Flower strategy tells clients {name} = {value!r}: only single values can be told")
    return config  # type: ignore[return-value]


def _require_enough_nodes(strategy: TheirStrategy, clients: int) -> None:
    """Raises `ConfigError` for a number of nodes that there will never be, and for which Flower would wait for ever."""
    for path, least in _attributes(strategy):
        name = path.rpartition(".")[2]
        if name.startswith("min_") and isinstance(least, int) and least > clients:
            raise ConfigError(
                f"the Flower strategy waits for {name} = {least}, and federated.clients is {clients}: lower it there, "
                "or raise that"
            )


def _attributes(strategy: TheirStrategy, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The attributes of a strategy, and of those that it wraps, which have dots in their names."""
    for name, value in vars(strategy).items():
        if isinstance(value, TheirStrategy):
            yield from _attributes(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class _CannotKeep(Exception):
    """Says of which type a value is that has no place in a server's state."""


_CONTAINERS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "ordered": OrderedDict,
    "arrays": ArrayRecord,
    "config": ConfigRecord,
    "metrics": MetricRecord,
}
_KIND_OF = {kind: name for name, kind in _CONTAINERS.items()}


def _pack(value: Any, arrays: list[Tensor]) -> Any:
    """A value as JSON has it; arrays go to the end of `arrays`, and their numbers stand for them."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _KIND_OF:
        items = value.items() if _maps(_KIND_OF[kind]) else value
        return {_KIND_OF[kind]: [_pack(item, arrays) for item in items]}
    found: dict[str, Any] = {}
    if isinstance(value, Tensor):
        found["tensor"] = value.detach().cpu().clone()
    elif isinstance(value, Array):
        found["array"] = _tensor_of(value.numpy())
    elif isinstance(value, np.ndarray | np.generic):
        found["numpy" if isinstance(value, np.ndarray) else "scalar"] = _tensor_of(value)
    elif kind is bytes:
        found["bytes"] = torch.tensor(list(value), dtype=torch.uint8)
    else:
        raise _CannotKeep(f"a {kind.__name__}")
    arrays.extend(found.values())
    return dict.fromkeys(found, len(arrays) - 1)


def _tensor_of(value: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):
        raise _CannotKeep(f"an array of {value.dtype}") from None


def _unpack(packed: Any, arrays: Mapping[str, Tensor]) -> Any:
    """The value that `_pack` had."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind in _CONTAINERS:
        items = [_unpack(item, arrays) for item in content]
        return _CONTAINERS[kind](OrderedDict(items) if kind == "arrays" else dict(items) if _maps(kind) else items)
    tensor = arrays[str(content)].clone()
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    return {"array": Array, "bytes": bytes, "numpy": np.asarray, "scalar": lambda one: one[()]}[kind](array)


def _maps(kind: str) -> bool:
    return kind not in ("list", "tuple")


def _is_state(value: Any) -> bool:
    """Whether an object that cannot be kept is there to change: a container, a generator of random numbers, or an
    object of Flower's, such as an accountant of privacy."""
    changing = isinstance(value, list | dict | set | bytearray)
    room = type(value).__module__.partition(".")[0]
    return changing or (room in ("collections", "random", "numpy", "flwr") and not callable(value))


def _number_of(client: str, clients: int, part: int | None) -> int:
    """Which part of the data a client has: that which it was given, or the number at the end of its name.

    Raises `UsageError` for a name without a number.
    """
    digits = client[len(client.rstrip("0123456789")) :]
    if part is None and not digits:
        raise UsageError(
            f"client {client} has no number at the end of its name, and a Flower app asks for its partition-id: give "
            "the client a part"
        )
    return part if part is not None else int(digits) % clients
