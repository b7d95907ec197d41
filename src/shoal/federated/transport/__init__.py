"""Rounds over the network: HTTP over TLS 1.3, where both ends show certificates. A thin layer over the state machines.

The library is aiohttp, for both ends: it streams bodies in either direction, has no limit on their size, and is
maintained. HTTP/1.1 is enough, since a client has one transfer at a time.
"""
