"""Do the tensors of a model and those of a checkpoint fit? If not, the first few differences say which model it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.checkpoint.manifest import TensorEntry
from shoal.errors import UsageError

_NAMED = 3


class Expected(NamedTuple):
    """What the model has under a name: the global shape and the element type."""

    shape: tuple[int, ...]
    dtype: str


Wanted = Sequence[tuple[str, Expected]]


def require_match(
    saved: Mapping[str, TensorEntry], wanted: Wanted, asked: Collection[str] | None, *, cast: bool
) -> None:
    """Raise `UsageError` unless `saved` can fill `wanted`, where a name may occur several times.

    `asked` are the names that all ranks together want: others in `saved`, and those missing there, are refused too;
    None does not compare names. `cast` allows other element types.
    """
    both = [(name, expected) for name, expected in wanted if name in saved]
    shapes = [_shapes(name, saved[name], want) for name, want in both if tuple(saved[name].shape) != want.shape]
    differences = [_listed("other shapes", shapes)]
    if asked is not None:
        differences.append(_listed("missing in it", sorted(_absent(asked, saved))))
        differences.append(_listed("only in it", sorted(_absent(saved, asked))))
    if any(differences):
        raise UsageError(
            f"this run directory holds another model: {'; '.join(filter(None, differences))}. "
            "Set run.directory to a new folder, or go back to the model that wrote it"
        )
    types = [
        f"{name} is {saved[name].dtype}, not {want.dtype}" for name, want in both if saved[name].dtype != want.dtype
    ]
    if types and not cast:
        raise UsageError(
            f"{_listed('the checkpoint has other element types', types)}: train in these, or ask for a cast"
        )


def _shapes(name: str, saved: TensorEntry, wanted: Expected) -> str:
    return f"{name} {list(saved.shape)} there, {list(wanted.shape)} here"


def _absent(names: Iterable[str], other: Collection[str]) -> list[str]:
    return [name for name in names if name not in other]


def _listed(what: str, items: Sequence[str]) -> str:
    items = list(dict.fromkeys(items))
    if not items:
        return ""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{what}: {', '.join(items[:_NAMED])}{more}"
