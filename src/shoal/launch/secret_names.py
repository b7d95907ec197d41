"""Which variables of the environment hold secrets, by their names. What records, shows or sends variables asks here.

A name is enough to be left out. A value is looked at for one thing alone: an address that carries a password.
"""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE|COOKIE|WEBHOOK|KEYS?(?![A-Z])|_(PASS|PWD|AUTH|DSN)$",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^\s/@:]*:[^\s/@]+@")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable of this name, or with this value, may hold a secret."""
    return _NAMES.search(name) is not None or _PASSWORD_IN_ADDRESS.search(value) is not None
