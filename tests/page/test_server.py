"""The page is served on loopback to whoever holds the token, and nothing else is served."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.runs import write_run
from tests.page.watching import watching
from tests.waiting import HANG_S

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[urllib.parse.SplitResult]:
    """The address of a page of one run."""
    directory = tmp_path_factory.mktemp("served") / "run"
    write_run(directory)
    with watching(directory) as (address, _):
        yield urllib.parse.urlsplit(address)


def get(served: urllib.parse.SplitResult, path: str, **headers: str) -> Answer:
    """One request, redirects not followed."""
    assert served.hostname
    connection = http.client.HTTPConnection(served.hostname, served.port, timeout=HANG_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def cookie(served: urllib.parse.SplitResult) -> str:
    """What the server gives for the token."""
    status, headers, _ = get(served, f"/?{served.query}")
    assert (status, headers["location"]) == (303, "/")
    return headers["set-cookie"]


@pytest.mark.parametrize("path", ["/", "/snapshot", "/events", "/page.js", "/?token=guess", "/?token="])
def test_without_the_token_nothing_is_shown(served: urllib.parse.SplitResult, path: str) -> None:
    """403 and one sentence, whatever is asked for."""
    status, _, body = get(served, path)
    assert status == 403
    assert body == b"Open the address that 'shoal watch' printed: it holds the token.\n"
    assert get(served, path, Cookie=f"shoal-watch-{served.port}=guess")[0] == 403


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_can_use(
    served: urllib.parse.SplitResult,
) -> None:
    """HttpOnly, SameSite=Strict; with it, page and snapshot are served, under a policy that allows their own files."""
    given = cookie(served)
    assert "HttpOnly" in given
    assert "SameSite=strict" in given
    kept = given.partition(";")[0]
    status, headers, body = get(served, "/", Cookie=kept)
    assert (status, b"<main>" in body) == (200, True)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    snapshot = json.loads(get(served, "/snapshot", Cookie=kept)[2])
    assert snapshot["runs"][0]["step"] == 60
    assert get(served, "/../server.py", Cookie=kept)[0] == 404


def test_it_listens_on_loopback_alone(served: urllib.parse.SplitResult) -> None:
    """The port of the page cannot be reached at another address of this host."""
    assert served.hostname == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for other in [*others, "127.0.0.2"]:
        with socket.socket() as client:
            assert client.connect_ex((str(other), served.port or 0)) != 0


def test_the_assets_name_no_other_host() -> None:
    """No address of another server in page, style and script, but the name space of SVG."""
    import shoal.page

    for path in (Path(shoal.page.__file__).parent / "assets").iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nowhere",), 2, "nowhere is not there: a page needs its events/"),
        ((".",), 2, "holds no run: a page needs its events/"),
        (("run", "--port", "{port}"), 3, "choose another port"),
        (("run", "--host", "192.0.2.1"), 3, "give an address of this host"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    served: urllib.parse.SplitResult, tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    """A folder without a run, a port that is taken, an address of another host."""
    write_run(tmp_path / "run", steps=2)
    told = [argument.format(port=served.port) for argument in arguments]
    command = [sys.executable, "-m", "shoal", "watch", *told]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
