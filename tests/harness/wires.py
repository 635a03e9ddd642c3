"""A wire between two network namespaces, which loses and delays packets: not every kernel has ``tc netem``.

    python -m tests.harness.wires NAMESPACE DEVICE ADDRESS NAMESPACE DEVICE ADDRESS LOSS DELAY SEED

makes a device with an address in each namespace, prints ``ready``, and carries packets both ways until it is ended: it
loses each with the probability LOSS, and hands over the others DELAY seconds later. Takes the rights of root and
``/dev/net/tun``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

__all__ = ["DEVICE", "carry", "device"]

#: What gives a program the packets of a device.
DEVICE = "/dev/net/tun"
# From linux/if_tun.h: what names a device; packets of IP, with nothing before them.
_NAME_IT = 0x400454CA
_PACKETS = 0x0001 | 0x1000
_LONGEST = 1 << 16


def device(namespace: str, name: str, address: str) -> int:
    """The descriptor of a new device in ``namespace``, which is gone once it is closed. Raises OSError."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _enter(there)
    try:
        made = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(made, _NAME_IT, struct.pack("16sH22x", name.encode(), _PACKETS))
        for words in (("addr", "add", address, "dev", name), ("link", "set", name, "up")):
            subprocess.run(("ip", *words), check=True)
    finally:
        _enter(here)
        os.close(here)
        os.close(there)
    return made


def carry(ends: tuple[int, int], loss: float, delay: float, rng: random.Random) -> None:
    """Carry packets between two devices for ever."""
    on_the_way: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        wait = None if not on_the_way else max(0.0, on_the_way[0][0] - time.monotonic()) * 1000
        for end, _ in poll.poll(wait):
            packet = os.read(end, _LONGEST)
            if rng.random() >= loss:
                on_the_way.append((time.monotonic() + delay, ends[end == ends[0]], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, end, packet = on_the_way.popleft()
            try:
                os.write(end, packet)
            except OSError as error:
                if error.errno != errno.EIO:  # that is a device that is down: the packet is lost
                    raise


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "the namespace cannot be entered")


def main(words: list[str]) -> None:
    """Do what the module says."""
    first, second = device(*words[0:3]), device(*words[3:6])
    print("ready", flush=True)
    carry((first, second), float(words[6]), float(words[7]), random.Random(int(words[8])))


if __name__ == "__main__":
    main(sys.argv[1:])
