"""Copies of checkpoints on a real S3-speaking server that fails requests and answers slowly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.load import read_all
from shoal.checkpoint.remote import FOLDER, RemoteCheckpoints, RemoteCopies, fetch_newest
from shoal.errors import ConfigError, EnvironmentFault, Stopped
from tests.checkpoint.states import same, save, saver_for, state_of

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from tests.checkpoint.s3_server import S3, s3_server


@pytest.fixture(scope="module")
def servers() -> Iterator[S3]:
    with s3_server() as found:
        yield found


@pytest.fixture
def server(servers: S3) -> S3:
    """The server without trouble."""
    servers.trouble.become()
    return servers


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A place of its own for each test."""
    return f"s3://copies/{request.node.name}"


def copied(store: RemoteCheckpoints, directory: Path, steps: list[int], *, keep: int = 3) -> list[str]:
    """Saves at `steps` in `directory`, each copied; the warnings."""
    warnings: list[str] = []
    saver = saver_for(directory, keep=keep)
    with RemoteCopies(store, directory, keep=keep, warn=warnings.append) as copies:
        saver.on_commit = copies.committed
        for step in steps:
            assert save(saver, step).committed
    return warnings


@pytest.mark.stress
def test_no_checkpoint_is_lost_though_a_tenth_of_the_requests_fail(tmp_path: Path, server: S3, url: str) -> None:
    """10 % of 503s and slow answers: every save arrives whole, and an empty directory elsewhere resumes from it."""
    server.trouble.become(failing=0.1, slow_s=0.005)
    store = RemoteCheckpoints(url, options=server.options, sleep=lambda seconds: None)
    assert copied(store, tmp_path / "here", [100, 200, 300, 400]) == []
    assert store.steps() == [400, 300, 200]
    assert "step 400" in fetch_newest(store, tmp_path / "there", newest_here=None)
    manifest, problems = newest_verified(tmp_path / "there")
    assert manifest is not None
    assert (manifest.step, problems) == (400, [])
    assert same(read_all(manifest, tmp_path / "there"), state_of(400))
    assert server.trouble.failed > 0, "no request failed: nothing was shown"
    assert not (tmp_path / "here" / FOLDER).exists()


def test_content_that_is_there_is_not_sent_again(tmp_path: Path, server: S3, url: str) -> None:
    """A second checkpoint of equal tensors costs its manifest alone."""
    store = RemoteCheckpoints(url, options=server.options)
    saver = saver_for(tmp_path, keep=3)
    first, second = save(saver, 100), save(saver, 100)
    assert (first.committed, second.committed) == (True, True)
    manifest, _ = newest_verified(tmp_path)
    assert manifest is not None
    whole = sum(manifest.objects.values())
    folder = tmp_path / "linked"
    folder.mkdir()
    for path in [*(tmp_path / "checkpoints/objects").iterdir(), *(tmp_path / "checkpoints").glob("step-*/*.json")]:
        (folder / path.name).write_bytes(path.read_bytes())
    assert store.send(folder, manifest) > whole
    again = RemoteCheckpoints(url, options=server.options)
    assert again.send(folder, manifest) == (folder / "manifest.json").stat().st_size


@pytest.mark.slow
def test_a_damaged_copy_is_passed_over_for_the_one_before(tmp_path: Path, server: S3, url: str) -> None:
    """An object that does not hash to its name never reaches a checkpoint."""
    store = RemoteCheckpoints(url, options=server.options)
    copied(store, tmp_path / "here", [100, 200])
    digest = next(d for d in store.manifest(200).objects if d not in store.manifest(100).objects)
    import fsspec

    name = f"{url.removeprefix('s3://')}/objects/{digest}.safetensors"
    fsspec.filesystem("s3", **server.options).pipe_file(name, b"other bytes")
    fetch_newest(store, tmp_path / "there", newest_here=None)
    manifest, _ = newest_verified(tmp_path / "there")
    assert manifest is not None
    assert manifest.step == 100


def test_a_newer_checkpoint_on_the_disk_is_kept(tmp_path: Path, server: S3, url: str) -> None:
    """What the store has is fetched only where it is newer."""
    store = RemoteCheckpoints(url, options=server.options)
    copied(store, tmp_path / "here", [100])
    assert fetch_newest(store, tmp_path / "there", newest_here=100) == ""
    assert not (tmp_path / "there").exists()


@pytest.mark.stress
def test_a_store_that_is_gone_costs_the_copy_and_not_the_run(tmp_path: Path, server: S3, url: str) -> None:
    """Every request fails: the save counts, and a sentence says which copy is missing; a start is refused."""
    server.trouble.become(failing=1.0)
    store = RemoteCheckpoints(url, options=server.options, attempts=2, sleep=lambda seconds: None)
    (warning,) = copied(store, tmp_path, [100])
    assert f"step 100 was not copied to {url}" in warning
    with pytest.raises(EnvironmentFault, match="attempts failed"):
        fetch_newest(store, tmp_path / "there", newest_here=None)


@pytest.mark.stress
def test_retention_on_the_disk_takes_nothing_from_a_slow_copy(tmp_path: Path, server: S3, url: str) -> None:
    """With keep = 1 each save deletes the one before; copies that are still on their way are whole all the same."""
    server.trouble.become(slow_s=0.05)
    store = RemoteCheckpoints(url, options=server.options)
    assert copied(store, tmp_path, [100, 200, 300], keep=1) == []
    assert store.steps() == [300]


@pytest.mark.slow
def test_a_stopped_run_waits_for_its_copies(tmp_path: Path, server: S3, url: str) -> None:
    """SIGTERM ends with a checkpoint that is in the store."""
    server.trouble.become(slow_s=0.05)
    store = RemoteCheckpoints(url, options=server.options)
    saver = saver_for(tmp_path, keep=3)
    copies = RemoteCopies(store, tmp_path, keep=3, warn=print)
    saver.on_commit = copies.committed
    save(saver, 100)
    copies.__exit__(Stopped, Stopped("a signal"), None)
    assert store.steps() == [100]


def test_a_damaged_checkpoint_on_the_disk_is_replaced_by_the_whole_copy(tmp_path: Path) -> None:
    """A bit of its manifest is flipped: the copy takes its place, and nothing else is left in the folder."""
    store = RemoteCheckpoints((tmp_path / "store").as_uri())
    assert copied(store, tmp_path / "here", [100, 200]) == []
    path = tmp_path / "here/checkpoints/step-00000200/manifest.json"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "step 200" in fetch_newest(store, tmp_path / "here", newest_here=100)
    manifest, problems = newest_verified(tmp_path / "here")
    assert manifest is not None
    assert (manifest.step, problems) == (200, [])
    assert not list((tmp_path / "here/checkpoints").glob(".tmp-*"))


def test_a_copy_with_a_missing_object_is_passed_over_at_once(tmp_path: Path) -> None:
    """Missing is an answer: nothing is asked for twice, and the copy before it is fetched."""
    pauses: list[float] = []
    store = RemoteCheckpoints((tmp_path / "store").as_uri(), sleep=pauses.append)
    copied(store, tmp_path / "here", [100, 200])
    digest = next(d for d in store.manifest(200).objects if d not in store.manifest(100).objects)
    (tmp_path / f"store/objects/{digest}.safetensors").unlink()
    assert "step 100" in fetch_newest(store, tmp_path / "there", newest_here=None)
    assert pauses == []


def test_an_object_that_was_cut_is_sent_again(tmp_path: Path) -> None:
    """Its name is there, with another size."""
    store = RemoteCheckpoints((tmp_path / "store").as_uri())
    copied(store, tmp_path / "here", [100])
    cut = next((tmp_path / "store/objects").iterdir())
    whole = cut.read_bytes()
    cut.write_bytes(whole[:10])
    copied(RemoteCheckpoints(store.url), tmp_path / "here", [100])
    assert cut.read_bytes() == whole


def test_a_copy_with_a_damaged_manifest_hinders_no_save(tmp_path: Path) -> None:
    """It counts as one of those kept, and no object is deleted while its objects are not known."""
    store = RemoteCheckpoints((tmp_path / "store").as_uri())
    copied(store, tmp_path / "here", [100, 200])
    named = set(store.manifest(200).objects)
    (tmp_path / "store/step-00000200.json").write_text("{}")
    assert copied(store, tmp_path / "here", [300], keep=2) == []
    assert store.steps() == [300, 200]
    assert {f"{digest}.safetensors" for digest in named} <= {p.name for p in (tmp_path / "store/objects").iterdir()}


def test_a_protocol_that_nobody_knows_is_a_sentence() -> None:
    """The key and the URL are named."""
    with pytest.raises(ConfigError, match=r"checkpoint\.remote = 'sss://bucket/run'"):
        RemoteCheckpoints("sss://bucket/run")


def test_states_differ_between_steps() -> None:
    """The steps of these tests hold different tensors, so that a wrong copy would show."""
    assert any(not torch.equal(state_of(100)[name], state_of(200)[name]) for name in state_of(100))
