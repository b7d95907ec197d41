"""Notices that this host is about to be taken away: a file that appears, or the cloud's metadata service.

    file   its first line is the reason
    url    asked every `POLL_S`: 404, "FALSE" and "NONE" mean nothing, any other answer of 200 is a notice
           http://169.254.169.254/latest/meta-data/spot/instance-action            (Amazon EC2; its token is fetched)
           http://metadata.google.internal/computeMetadata/v1/instance/preempted   (Google Compute Engine)

Clouds give notice 30 s (Google) to 2 minutes (Amazon) before the end.
"""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

POLL_S, TIMEOUT_S = 2.0, 5.0
MOST_BYTES = 200
"""Of a notice that are shown."""
NOTHING = (b"", b"FALSE", b"NONE")
_TOKEN_HEADER, _TOKEN_PATH, _TOKEN_S = "X-aws-ec2-metadata-token", "/latest/api/token", "300"
_DIRECT = urllib.request.ProxyHandler({})
"""The metadata service is on this host: no proxy reaches it."""


@dataclass(frozen=True)
class Preemption:
    """This host is about to be taken away; `sentence` says who told so."""

    sentence: str


@contextmanager
def watching_for_preemption(
    file: str | None,
    url: str | None,
    *,
    told: Callable[[Preemption], None],
    warn: Callable[[str], None],
    poll_s: float = POLL_S,
) -> Iterator[None]:
    """Until the end of the block, `told` hears once that there is a notice, in a thread of its own. `warn` hears once
    of a service that cannot be asked. Without `file` and `url` nothing is watched.
    """
    if file is None and url is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        warned = False
        while not over.is_set():
            try:
                found = notice_in(file, url)
            except OSError as error:
                found = None
                if not warned:
                    warned = True
                    warn(f"run.preemption_url: {urlsplit(url or '').hostname} cannot be asked ({error})")
            if found is not None:
                told(Preemption(found))
                return
            over.wait(poll_s)

    thread = threading.Thread(target=watch, name="shoal-preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(TIMEOUT_S)


def notice_in(file: str | None, url: str | None) -> str | None:
    """The notice that is there now, as a sentence; None without one. Raises `OSError` where `url` cannot be asked."""
    if file is not None and (text := _first_line(Path(file))) is not None:
        return f"this host is about to be taken away: {file} is there{f' ({text})' if text else ''}"
    if url is not None and (text := _answer(url)) is not None:
        return f"this host is about to be taken away: {url} says {text!r}"
    return None


def _first_line(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError:  # it is there, whatever it is
        return ""
    return (content.splitlines() or [b""])[0].decode("utf-8", "replace").strip()


def _answer(url: str) -> str | None:
    headers = {"Metadata-Flavor": "Google", "Metadata": "true"}
    try:
        content = _asked(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code != 401:
            raise
        content = _get_with_token(url, headers)
    return None if content is None or content.strip().upper() in NOTHING else content.decode("utf-8", "replace").strip()


def _get_with_token(url: str, headers: dict[str, str]) -> bytes | None:
    """As version 2 of Amazon's service wants it (AWS, "Use the Instance Metadata Service", IMDSv2)."""
    parts = urlsplit(url)
    request = urllib.request.Request(
        f"{parts.scheme}://{parts.netloc}{_TOKEN_PATH}",
        headers={f"{_TOKEN_HEADER}-ttl-seconds": _TOKEN_S},
        method="PUT",
    )
    token = _asked(request).decode("ascii", "replace")
    try:
        return _asked(urllib.request.Request(url, headers={**headers, _TOKEN_HEADER: token}))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _asked(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.build_opener(_DIRECT).open(request, timeout=TIMEOUT_S) as answer:
            return answer.read(MOST_BYTES)
    except (http.client.HTTPException, ValueError) as error:  # an answer that is no HTTP; a redirect to no URL
        raise OSError(f"{type(error).__name__}: {error}") from error
