"""What the kernel counted on the interfaces of this network namespace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INTERFACES = Path("/sys/class/net")
LOOPBACK = "lo"


@dataclass(frozen=True)
class Counted:
    """Sent to other hosts since the interfaces were made, headers included."""

    bytes_sent: int
    packets_sent: int

    def __sub__(self, earlier: Counted) -> Counted:
        return Counted(self.bytes_sent - earlier.bytes_sent, self.packets_sent - earlier.packets_sent)


def counted(interfaces: Path = INTERFACES) -> Counted:
    """The sum over all interfaces but the loopback."""
    names = [path for path in interfaces.iterdir() if path.name != LOOPBACK]
    return Counted(_sum(names, "tx_bytes"), _sum(names, "tx_packets"))


def _sum(interfaces: list[Path], counter: str) -> int:
    return sum(int((path / "statistics" / counter).read_text()) for path in interfaces)
