"""The names of the two peers that every process has.

The name of another peer is the identity of its socket. An identity that a peer chose is not empty and does not begin
with a zero; one that libzmq made has five bytes.
"""

from __future__ import annotations

__all__ = ["SERVER", "SUPERVISOR"]

SERVER = b""
SUPERVISOR = b"\0s"
