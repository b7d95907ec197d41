"""Keys: X25519 agreement (RFC 7748), HKDF-SHA256 (RFC 5869) for a key of each purpose, ChaCha20-Poly1305 (RFC 8439).

Every key and every sealed message is bound to its session, to its two ends and to what it is for, so that nothing that
was recorded in one round is worth anything in another.
"""

from __future__ import annotations

from shoal.errors import MissingExtra

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtra("cryptography", extra="federated", purpose="secure aggregation") from error

KEY_BYTES = 32
_NONCE = bytes(12)
"""Every key of a pair seals one message in each direction, so its nonce may stand still."""


class BadMessage(ValueError):
    """A key or a sealed message that is none."""


def new_private() -> bytes:
    """A private key from the operating system's entropy."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, *, purpose: str, session: bytes) -> bytes:
    """The key of 32 bytes that both ends have. Raises `BadMessage` for a public key of low order."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise BadMessage("a public key is none of X25519") from error
    return HKDF(SHA256(), KEY_BYTES, salt=session, info=f"shoal secure aggregation, {purpose}".encode()).derive(shared)


def seal(key: bytes, content: bytes, *, sender: str, receiver: str, session: bytes) -> bytes:
    """`content` for `receiver` alone. `key` is agreed for the direction, or it would seal two messages."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, _bound(sender, receiver, session))


def unseal(key: bytes, sealed: bytes, *, sender: str, receiver: str, session: bytes) -> bytes:
    """What was sealed. Raises `BadMessage` where it was changed, or is of another sender, receiver or session."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, _bound(sender, receiver, session))
    except InvalidTag as error:
        raise BadMessage(f"what {sender} sealed for {receiver} was changed on the way") from error


def _bound(sender: str, receiver: str, session: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (session, sender.encode(), receiver.encode()))
