"""The container file, linted; and built where there is a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "container/Dockerfile"
PINNED = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*( AS \w+)?")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined, comments left out."""
    lines = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines.splitlines() if line.strip())]


def faults(text: str) -> list[str]:
    """What a careful reader would object to."""
    found = instructions(text)
    last = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    users = [rest for word, rest in found[last:] if word == "USER"]
    wrong = [f"not pinned: {rest}" for word, rest in found if word == "FROM" and not PINNED.fullmatch(rest)]
    wrong += [] if users and not users[-1].startswith(("root", "0")) else ["runs as root"]
    for word, rest in found:
        if word == "ADD":
            wrong.append(f"ADD fetches and unpacks; COPY does not: {rest}")
        if "apt-get install" in rest and not (
            "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        ):
            wrong.append(f"apt-get leaves what nobody needs: {rest}")
        if re.search(r"\bpip (install|wheel)\b", rest) and "--no-cache-dir" not in rest:
            wrong.append(f"pip leaves its cache: {rest}")
        if "pip install" in rest and "--constraint" not in rest:
            wrong.append(f"versions are not pinned: {rest}")
        if word == "COPY" and "--from" not in rest:
            wrong += [f"missing: {name}" for name in rest.split()[:-1] if not (ROOT / name).exists()]
    wrong += ["a compiler in the image that runs" for _, rest in found[last:] if "gcc" in rest]
    return wrong


def test_the_container_file_is_clean() -> None:
    """Pinned, without root, without caches and compilers; everything that it copies is there."""
    assert faults(CONTAINER.read_text()) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("3.12.8-slim-bookworm AS wheel", "latest", "not pinned"),
        ("USER 1000:1000\n", "", "runs as root"),
        (" --no-install-recommends", "", "apt-get leaves"),
        ("pip install --no-cache-dir", "pip install", "pip leaves"),
        (" --constraint /wheels/constraints.txt", "", "versions are not pinned"),
        ("COPY src src", "COPY sources src", "missing: sources"),
        ("RUN useradd", "RUN apt-get install gcc; useradd", "a compiler"),
    ],
)
def test_a_spoiled_container_file_is_not(before: str, after: str, words: str) -> None:
    """Each rule sees its fault."""
    text = CONTAINER.read_text()
    assert before in text
    assert any(words in fault for fault in faults(text.replace(before, after)))


def why_no_builder() -> str | None:
    """Why no image can be built here; None where one can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    answers = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=20).returncode == 0
    return None if answers else "no container builder answers (docker info)"


@pytest.mark.stress
@pytest.mark.skipif(why_no_builder() is not None, reason=str(why_no_builder()))
@pytest.mark.timeout(1800)
def test_the_image_builds_and_answers() -> None:
    """And runs as a user that is not root."""
    subprocess.run(["docker", "build", "-q", "-f", CONTAINER, "-t", "shoal-test", ROOT], check=True)
    done = subprocess.run(["docker", "run", "--rm", "shoal-test", "sh", "-c", "id -u; shoal --version"], text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert done.stdout.startswith("1000\nshoal ")
