"""Enrolment: certificates are made once, and a token is good for one client, whatever breaks off meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal.assembly.federated import serve
from shoal.errors import EnvironmentFault, UsageError
from shoal.federated.transport import enrol as enrolment
from shoal.federated.transport.enrol import (
    enrol,
    enrol_by_token,
    name_on,
    new_tokens,
    redeem,
    require_authority,
    tls_context,
)
from tests.federated.tasks import run_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder, with an authority."""
    enrol(tmp_path / "server", names=[], hosts=["127.0.0.1"])
    return tmp_path / "server"


def request_for(key: Any) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "new")])
    how = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, how).public_bytes(Encoding.PEM)


def test_enrolment_makes_certificates_once(tmp_path: Path) -> None:
    """Keys are the owner's alone; a name is given once; a second call keeps the authority."""
    paths = enrol(tmp_path / "c", names=["a", "b"], hosts=["localhost", "127.0.0.1"])
    authority = (tmp_path / "c/authority.pem").read_bytes()
    assert [path.name for path in paths] == ["a.pem", "b.pem"]
    assert ((tmp_path / "c/a.key").stat().st_mode & 0o777) == 0o600
    enrol(tmp_path / "c", names=["c"], hosts=["localhost"])
    assert (tmp_path / "c/authority.pem").read_bytes() == authority
    for name in ("a", "server", "../x", ""):
        with pytest.raises(UsageError):
            enrol(tmp_path / "c", names=[name], hosts=[])
    assert tls_context(tmp_path / "c", "a", server=False).minimum_version.name == "TLSv1_3"
    assert name_on({"subject": ((("commonName", "a"),),)}) == "a"
    assert name_on({}) is None


def test_tokens_made_at_once_are_all_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that redeems one and others that make some, each of which reads the file before it writes it."""
    read = enrolment._tokens

    def slowly(path: Path) -> Any:
        found = read(path)
        time.sleep(0.005)
        return found

    monkeypatch.setattr(enrolment, "_tokens", slowly)
    with ThreadPoolExecutor(4) as pool:
        made = [token for some in pool.map(lambda _: new_tokens(folder, count=2, hours=1), range(8)) for token in some]
    request = request_for(ec.generate_private_key(ec.SECP256R1()))
    for number, token in enumerate(made):
        redeem(folder, token=token, name=f"client-{number}", request=request)


def test_a_client_that_heard_no_answer_asks_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same token, name and key it gets its certificate, be it made already or not; nobody else gets one."""
    token = new_tokens(folder, count=1, hours=1)[0]
    mine, other = (request_for(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
    replace = enrolment.replace_file

    def killed(path: Path, content: bytes) -> None:
        if path.suffix == ".pem":
            raise KeyboardInterrupt
        replace(path, content)

    monkeypatch.setattr(enrolment, "replace_file", killed)
    with pytest.raises(KeyboardInterrupt):
        redeem(folder, token=token, name="new", request=mine)
    monkeypatch.setattr(enrolment, "replace_file", replace)
    first = redeem(folder, token=token, name="new", request=mine)
    assert redeem(folder, token=token, name="new", request=mine) == first == (folder / "new.pem").read_bytes()
    for name, request in (("new", other), ("second", mine)):
        with pytest.raises(UsageError, match=r"the token is not valid: .* it was used, or it has expired"):
            redeem(folder, token=token, name=name, request=request)


def test_a_client_keeps_the_key_that_it_asked_with(folder: Path) -> None:
    """The server is away; the next try is with the same key. An address without a port is one sentence."""
    keys = set[bytes]()
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="cannot be asked for a certificate"):
            enrol_by_token(folder, server="127.0.0.1:1", name="new", token="x")
        assert (folder / "new.key").stat().st_mode & 0o777 == 0o600
        keys.add((folder / "new.key").read_bytes())
    assert len(keys) == 1
    (folder / "new.key").write_bytes(b"garbage")
    with pytest.raises(EnvironmentFault, match=r"new\.key cannot be used as the key of new"):
        enrol_by_token(folder, server="127.0.0.1:1", name="new", token="x")
    for server in ("host", "host:", ":1", "host:x"):
        with pytest.raises(UsageError, match=f"'{server}' is no address: it is HOST:PORT"):
            enrol_by_token(folder, server=server, name="third", token="x")
    with pytest.raises(UsageError, match=r"none/authority\.pem is missing: copy it there"):
        enrol_by_token(folder / "none", server="127.0.0.1:1", name="third", token="x")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (ec.generate_private_key(ec.SECP384R1()), "must be one of the curve P-256"),
        (ed25519.Ed25519PrivateKey.generate(), "must be one of the curve P-256"),
        (None, "is no certificate request"),
    ],
    ids=["P-384", "Ed25519", "garbage"],
)
def test_a_request_for_another_key_is_refused_and_the_token_stays(key: Any, says: str, folder: Path) -> None:
    token = new_tokens(folder, count=1, hours=1)[0]
    with pytest.raises(UsageError, match=says):
        redeem(folder, token=token, name="new", request=b"x" if key is None else request_for(key))
    redeem(folder, token=token, name="new", request=request_for(ec.generate_private_key(ec.SECP256R1())))


def test_a_server_that_enrols_needs_the_authoritys_key(folder: Path, tmp_path: Path) -> None:
    """It is refused at its start, not when the first client asks."""
    require_authority(folder)
    enrol(tmp_path / "other", names=[], hosts=["127.0.0.1"])
    wrong = (tmp_path / "other" / "authority.key").read_bytes()
    for content, says in ((wrong, "is not the key of authority.pem"), (b"x", "cannot be used"), (None, "No such file")):
        key = folder / "authority.key"
        key.write_bytes(content) if content is not None else key.unlink()
        with pytest.raises(EnvironmentFault, match=says):
            serve(
                run_file(),
                certificates=folder,
                address="127.0.0.1",
                port=0,
                listening=str,
                told=str,
                enrolment=True,
            )
