"""The relay between two rehearsed hosts: the packets that it changes and makes, and connections that pass it."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import pytest

from shoal.experiments.rehearsal.faults import Trouble, flipped, relay, resets_of, why_no_relay
from tests.waiting import HANG_S, wait_until

SERVE = """
import socket
listener = socket.create_server(("10.79.0.1", 5555))
print("listening", flush=True)
connection, _ = listener.accept()
try:
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    print("ended")
except OSError as error:
    print(type(error).__name__)
"""
TALK = """
import os, socket, sys
connection = socket.create_connection(("10.79.0.1", 5555))
connection.settimeout(float(sys.argv[1]))
sent = b"a" * 4000
print("connected", flush=True)
sys.stdin.readline()
try:
    for _ in range(20):
        connection.sendall(sent)
        got = b""
        while len(got) < len(sent):
            got += connection.recv(1 << 16)
        if got != sent:
            print("changed")
    print("ended")
except OSError as error:
    print(type(error).__name__)
"""
PATIENCE_S = 1.0
"""How long an end of a connection that is cut off waits; one that is not may take as long as it likes."""


def packet(payload: bytes, *, draw: random.Random, options: int = 0) -> bytes:
    """IPv4 with `options` words of options each, TCP, and a checksum that is right."""
    ip_words, tcp_words = 5 + options, 5 + options
    size = 4 * (ip_words + tcp_words) + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x40 | ip_words, 0, size, 0, 0, 64, 6, 0) + draw.randbytes(8 + 4 * options)
    ports = draw.randbytes(4) + draw.randbytes(8)
    tcp = ports + struct.pack("!BBHHH", tcp_words << 4, 0x18, 1000, 0, 0) + bytes(4 * options)
    found = bytearray(ip + tcp + payload)
    start = 4 * ip_words
    found[start + 16 : start + 18] = struct.pack("!H", checksum(bytes(found), over_zero=True))
    return bytes(found)


def checksum(found: bytes, *, over_zero: bool = False) -> int:
    """What the sum over pseudo header and segment leaves: 0 where the checksum in it is right."""
    start = 4 * (found[0] & 15)
    segment = bytearray(found[start:])
    if over_zero:
        segment[16:18] = b"\0\0"
    data = found[12:20] + struct.pack("!BBH", 0, 6, len(segment)) + bytes(segment) + b"\0" * (len(segment) % 2)
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    return 0xFFFF - (total % 0xFFFF or (0xFFFF if total else 0))


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_packet_differs_in_one_bit_and_passes_for_sound(seed: int) -> None:
    """Of the payload, and the checksum is right; packets with little payload stay as they are."""
    draw = random.Random(seed)
    sound = packet(draw.randbytes(draw.randint(256, 3000)), draw=draw, options=seed % 3)
    assert checksum(sound) == 0
    changed = flipped(sound)
    assert changed is not None
    assert checksum(changed) == 0
    start = 8 * (5 + seed % 3)
    differing = [a ^ b for a, b in zip(sound[start:], changed[start:], strict=True)]
    assert sum(one.bit_count() for one in differing) == 1
    assert flipped(packet(b"a" * 255, draw=draw)) is None
    assert flipped(b"\x60" + bytes(100)) is None, "IPv6"


@pytest.mark.parametrize("seed", range(5))
def test_resets_end_a_connection_at_both_ends(seed: int) -> None:
    """The sender's comes from its peer with the acknowledged number, the receiver's from the sender with the packet's;
    their checksums are right."""
    draw = random.Random(seed)
    sound = packet(b"abc", draw=draw)
    found = resets_of(sound)
    assert found is not None
    to_sender, to_receiver = found
    addresses, ports = (sound[12:16], sound[16:20]), (sound[20:22], sound[22:24])
    for answer, first, number in ((to_sender, 1, sound[28:32]), (to_receiver, 0, sound[24:28])):
        assert checksum(answer) == 0
        assert (answer[12:16], answer[16:20]) == (addresses[first], addresses[1 - first])
        assert (answer[20:22], answer[22:24]) == (ports[first], ports[1 - first])
        assert answer[24:28] == number
        assert answer[33] == 0x04
    assert resets_of(packet(b"", draw=draw)) is None, "without data nothing is known of the connection"


@pytest.mark.stress
@pytest.mark.skipif(why_no_relay() is not None, reason="needs root, iproute2 and /dev/net/tun")
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (None, {"ended"}),
        ("partition", {"TimeoutError"}),
        ("half_open", {"TimeoutError"}),
        ("link_down", {"TimeoutError"}),
        ("reset", {"ConnectionResetError"}),
        ("flip", {"changed", "ended"}),
        ("delay", {"ended"}),
        ("slow_link", {"ended"}),
    ],
)
def test_a_connection_feels_the_trouble(trouble: Trouble | None, said: set[str]) -> None:
    """What its end says; when the trouble is over, so is what is left of it."""
    cut = trouble in ("partition", "half_open", "link_down")
    with relay() as joined:
        serve = [*joined.hosts[0].enter, sys.executable, "-c", SERVE]
        talk = [*joined.hosts[1].enter, sys.executable, "-c", TALK, str(PATIENCE_S if cut else HANG_S)]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            with subprocess.Popen(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                assert client.stdin is not None
                assert client.stdout.readline() == "connected\n"
                if trouble is not None:
                    joined.begin(trouble)
                client.stdin.write("\n")
                client.stdin.flush()
                assert set(client.stdout.read().split()) == said
                assert trouble is None or joined.struck
                joined.end()
            wait_until(lambda: server.poll() is not None)
