"""A cluster of one folder, behind a `kubectl` that answers as the real one does: what is applied stays.

Its rules are those of the servers that Shoal's jobs meet: a dry run stores nothing; applying what is there already
changes nothing; a job's spec cannot change; a TrainJob is refused, in a dry run too, unless its runtime is stored
(Trainer's admission webhook asks the cluster for it); a runtime that a TrainJob uses stays until that is gone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Refused(Exception):
    """What the server complains of."""


class Cluster:
    """The objects of a folder, each a file `KIND.NAME.json`; `calls` has kubectl's arguments, a line each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def objects(self) -> list[str]:
        """KIND.NAME of all."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def calls(self) -> list[str]:
        """What kubectl was called with."""
        return (self.folder / "calls").read_text().splitlines()

    def read(self, name: str) -> dict[str, Any]:
        """One of `objects`."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        path = self._path(kind, name)
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, found: dict[str, Any]) -> None:
        self._path(found["kind"], found["metadata"]["name"]).write_text(json.dumps(found))

    def end(self, kind: str, name: str, condition: str) -> None:
        """The controller's word that a job has ended."""
        found = self.get(kind, name)
        assert found is not None
        self.put(found | {"status": {"conditions": [{"type": condition, "status": "True", "message": "as it is"}]}})

    def apply(self, found: dict[str, Any], *, dry_run: bool) -> str:
        kind, name = found["kind"], found["metadata"]["name"]
        there = self.get(kind, name)
        if kind == "TrainJob" and self.get("TrainingRuntime", found["spec"]["runtimeRef"]["name"]) is None:
            raise Refused(
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.RuntimeRef: '
                "Invalid value: specified trainingRuntime must be created before the TrainJob is created"
            )
        if kind in ("JobSet", "TrainJob") and there is not None and there["spec"] != found["spec"]:
            raise Refused(f'The {kind} "{name}" is invalid: spec: Invalid value: field is immutable')
        if not dry_run:
            self.put({**(there or {}), **found})
        return f"{kind.lower()}/{name} {'created' if there is None else 'configured'}"

    def delete(self, kind: str, name: str) -> None:
        self._path(kind, name).unlink(missing_ok=True)

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind.lower()}.{name}.json"


def kubectl(cluster: Cluster, arguments: list[str]) -> str:
    """What kubectl prints for these arguments. Raises `Refused`."""
    words = [word for word in arguments if not word.startswith("--")]
    if "--namespace" in arguments:
        words = words[1:]  # its value
    if "--filename" in arguments:
        import yaml

        path = Path(arguments[arguments.index("--filename") + 1])
        dry_run = "--dry-run=server" in arguments
        return "\n".join(cluster.apply(one, dry_run=dry_run) for one in yaml.safe_load_all(path.read_text()))
    verb, *named = words
    if verb == "get" and named == ["pods"]:
        return json.dumps(
            {"items": [found for found in map(cluster.read, cluster.objects()) if found["kind"] == "Pod"]}
        )
    pairs = [tuple(word.split("/")) for word in named] if "/" in named[0] else [(named[0], named[1])]
    if verb == "delete":
        for kind, name in pairs:
            cluster.delete(kind, name)
        return ""
    assert verb == "get", arguments
    found = cluster.get(*pairs[0])
    return "" if found is None else json.dumps(found)


def install(folder: Path, programs: Path) -> Cluster:
    """A program `kubectl` in the folder `programs`, which talks to the cluster of `folder`."""
    folder.mkdir()
    (programs / "kubectl").write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); '
        f'from tests.submit.cluster import main; main()" {folder} "$@"\n'
    )
    (programs / "kubectl").chmod(0o755)
    return Cluster(folder)


def main() -> None:
    """As a program."""
    cluster, arguments = Cluster(Path(sys.argv[1])), sys.argv[2:]
    with (cluster.folder / "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    try:
        print(kubectl(cluster, arguments))
    except Refused as refusal:
        sys.exit(f"Error from server: {refusal}")
