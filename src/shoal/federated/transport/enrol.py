"""Enrolment: an authority of the run's own, a certificate for the server, and one for each client.

    DIRECTORY/authority.pem, authority.key      who vouches for all of them; the key stays with whoever enrols
    DIRECTORY/server.pem, server.key
    DIRECTORY/NAME.pem, NAME.key                 for the client NAME, who also needs authority.pem

A client is who its certificate says. Certificates of clients cannot serve, and that of the server is no client's.

A token lets one client enrol by itself: it makes a key, which never leaves it, and sends the token and a request to a
server that has the authority's key. `tokens.json` has the tokens' digests, until when they are good, and who used them;
a token is used before its certificate is made. A client that did not hear the answer asks again, with the same key and
the same token, and gets its certificate. Whoever changes `tokens.json` holds `tokens.lock`.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.errors import EnvironmentFault, MissingExtra, UsageError
from shoal.observe.facts import replace_file

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise MissingExtra("cryptography", extra="federated", purpose="enrolment") from error

AUTHORITY, SERVER, TOKENS, LOCK = "authority", "server", "tokens.json", "tokens.lock"
MOST_REQUEST_BYTES = 8192
REQUEST_S = 30.0
DAYS = 365
INVALID = "the token is not valid: this server does not know it, it was used, or it has expired; ask for a new one"
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Used(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that was used, by a client of this name with the key of this digest; good for the same again."""

    until: float
    name: str
    key: str


def enrol(directory: Path, *, names: Sequence[str], hosts: Sequence[str], days: int = DAYS) -> list[Path]:
    """Makes what is missing of the authority and the server's certificate, and a certificate for each of `names`.

    `hosts`: the names and addresses by which clients reach the server. Returns the files of the clients. Raises
    `UsageError` for a name that none may have, or that has a certificate already.
    """
    for name in names:
        _require_name(directory, name)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _authority(directory, days)
    if not (directory / f"{SERVER}.pem").exists():
        _issue(directory, SERVER, authority, days, hosts=hosts)
    for name in names:
        _issue(directory, name, authority, days)
    return [directory / f"{name}.pem" for name in names]


def new_tokens(directory: Path, *, count: int, hours: float) -> list[str]:
    """Tokens of 192 bits, each good for one client and for so long; the folder keeps their digests alone."""
    made = [secrets.token_urlsafe(24) for _ in range(count)]
    until = time.time() + 3600 * hours
    with _locked(directory):
        known = _tokens(directory / TOKENS)
        _keep_tokens(directory / TOKENS, known | {_digest(token.encode()): until for token in made})
    return made


def redeem(directory: Path, *, token: str, name: str, request: bytes, days: int = DAYS) -> bytes:
    """The certificate of `name`, in PEM, for the key of a signing request, in PEM. Uses the token up: from then on it
    is good for the same name and key alone.

    Raises `UsageError` for a token that is not valid, a name that none may have or that has a certificate, and a
    request that is none.
    """
    digest, now = _digest(token.encode()), time.time()
    with _locked(directory):
        known = {one: entry for one, entry in _tokens(directory / TOKENS).items() if _until(entry) >= now}
        entry = known.get(digest)
        if entry is None:
            raise UsageError(INVALID)
        key = _requested_key(name, request)
        used = _Used(_until(entry), name, _digest(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)))
        path = directory / f"{name}.pem"
        if isinstance(entry, _Used) and entry != used:
            raise UsageError(INVALID)
        if entry == used and path.exists():
            return path.read_bytes()
        _require_name(directory, name)
        authority = require_authority(directory)
        _keep_tokens(directory / TOKENS, known | {digest: used})
        content = _certificate(name, key, authority, days).public_bytes(Encoding.PEM)
        replace_file(path, content)
    return content


def enrol_by_token(directory: Path, *, server: str, name: str, token: str) -> Path:
    """Makes a key for `name` in the folder, which has authority.pem, and gets its certificate from `server`, HOST:PORT.
    A key that is there without a certificate, from a try that broke off, is used again.

    Returns the certificate's file. Raises `UsageError` where the server refuses, `EnvironmentFault` where it is away.
    """
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"'{server}' is no address: it is HOST:PORT, as `shoal federate server` prints it")
    _require_name(directory, name)
    if not (authority := directory / f"{AUTHORITY}.pem").is_file():
        raise UsageError(f"{authority} is missing: copy it there from whoever runs the server")
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        request = _request(name, _key_of_client(directory, name))
        said = {"token": token, "name": name, "request": request.decode()}
        connection = http.client.HTTPSConnection(host, int(port), timeout=REQUEST_S, context=context)
        connection.request("POST", "/enrol", json.dumps(said))
        answer = connection.getresponse()
        content = answer.read(MOST_REQUEST_BYTES)
    except (OSError, OverflowError, http.client.HTTPException) as error:
        raise EnvironmentFault(
            f"{server} cannot be asked for a certificate ({error}): is it a server with --enrol, and is "
            f"{AUTHORITY}.pem in {directory} its authority's?"
        ) from error
    if answer.status != 200:
        raise UsageError(f"the server does not enrol {name}: {content.decode(errors='replace')[:500]}")
    replace_file(directory / f"{name}.pem", content)
    return directory / f"{name}.pem"


def _request(name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A signing request for a key, in PEM."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    asked = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return asked.public_bytes(Encoding.PEM)


def _key_of_client(directory: Path, name: str) -> ec.EllipticCurvePrivateKey:
    """The key that lies there, or a new one. Raises `EnvironmentFault`."""
    path = directory / f"{name}.key"
    try:
        if path.exists():
            return _private_key(path)
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(directory, name, key)
    except (OSError, ValueError, TypeError) as error:
        raise EnvironmentFault(
            f"{path} cannot be used as the key of {name} ({error}): remove it, and join again"
        ) from error
    return key


def _requested_key(name: str, request: bytes) -> ec.EllipticCurvePublicKey:
    """The key that a signing request is for. Raises `UsageError`."""
    try:
        asked = x509.load_pem_x509_csr(request)
        key, valid = asked.public_key(), asked.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"the request of {name} is no certificate request: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError(f"the request of {name} is for a key of another kind: it must be one of the curve P-256")
    if not valid:
        raise UsageError(f"the request of {name} is not signed by the key that it is for")
    return key


def tls_context(directory: Path, name: str, *, server: bool, anybody: bool = False) -> ssl.SSLContext:
    """TLS 1.3 with the certificate of `name`; the other end must show one of the same authority, or with `anybody` may
    show none.

    Raises `EnvironmentFault` for files that are missing or are no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL if anybody else ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
        context.load_verify_locations(directory / f"{AUTHORITY}.pem")
    except (OSError, ssl.SSLError) as error:
        raise EnvironmentFault(
            f"the certificates of {name} in {directory} cannot be used ({error}): `shoal federate enrol` makes "
            f"{name}.pem, {name}.key and {AUTHORITY}.pem"
        ) from error
    return context


def name_on(certificate: object) -> str | None:
    """The client's name on a certificate as `ssl` gives it; None where there is none."""
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    return next((value for entry in subject for key, value in entry if key == "commonName"), None)


def _require_name(directory: Path, name: str) -> None:
    if not CLIENT_NAME.fullmatch(name) or name in (AUTHORITY, SERVER):
        raise UsageError(f"{name!r} cannot be a client's name: letters, digits, '.', '_' and '-', but not 'server'")
    if (directory / f"{name}.pem").exists():
        raise UsageError(f"client {name} is enrolled already: {directory / name}.pem is there; choose another name")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _until(entry: float | _Used) -> float:
    return entry.until if isinstance(entry, _Used) else entry


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Nobody else changes the folder's tokens meanwhile."""
    with (directory / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tokens(path: Path) -> dict[str, float | _Used]:
    """Until when each token is good, seconds since 1970, by its digest. Raises `EnvironmentFault`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float | _Used]) if path.exists() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise EnvironmentFault(f"{path} cannot be read ({error}): remove it, and make new tokens") from error


def _keep_tokens(path: Path, tokens: dict[str, float | _Used]) -> None:
    replace_file(path, msgspec.json.encode(tokens))


def require_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority's certificate and key. Raises `EnvironmentFault` where they are missing or do not fit."""
    try:
        certificate = x509.load_pem_x509_certificate((directory / f"{AUTHORITY}.pem").read_bytes())
        key = _private_key(directory / f"{AUTHORITY}.key")
        if key.public_key() != certificate.public_key():
            raise ValueError(f"{AUTHORITY}.key is not the key of {AUTHORITY}.pem")
    except (OSError, ValueError, TypeError) as error:
        raise EnvironmentFault(f"the authority in {directory} cannot be used ({error}): give another folder") from error
    return certificate, key


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A key of the curve P-256. Raises `OSError`, `ValueError` and `TypeError`."""
    key = load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"{path.name} has no key of the curve P-256")
    return key


def _authority(directory: Path, days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if (directory / f"{AUTHORITY}.pem").exists():
        return require_authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal federated authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _dated(x509.CertificateBuilder(), days).subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    _write(directory, AUTHORITY, certificate, key)
    return certificate, key


def _issue(
    directory: Path,
    name: str,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    days: int,
    *,
    hosts: Iterable[str] = (),
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write(directory, name, _certificate(name, key.public_key(), authority, days, hosts=hosts), key)


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    days: int,
    *,
    hosts: Iterable[str] = (),
) -> x509.Certificate:
    issuer, issuer_key = authority
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _dated(x509.CertificateBuilder(), days)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_named(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _dated(builder: x509.CertificateBuilder, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    begins = now - datetime.timedelta(minutes=5)  # clocks differ
    serial = x509.random_serial_number()
    return builder.serial_number(serial).not_valid_before(begins).not_valid_after(now + datetime.timedelta(days=days))


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    _write_key(directory, name, key)
    (directory / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))


def _write_key(directory: Path, name: str, key: ec.EllipticCurvePrivateKey) -> None:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor = os.open(directory / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
