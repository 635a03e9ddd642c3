"""The division of the addresses of a process among the segments that it may have to map.

A reservation takes no memory until it is touched, but it takes addresses, and the server maps every segment. So each
kind of segment gets a part of a budget, whatever the size of the machine. A slab and the segments beside it begin with
a share that leaves room for every dtype, every replica and several optimizers. They are extended when a variable needs
more. All other segments keep their first length.
"""

from __future__ import annotations

from cs_proto.arithmetic.optimizers import SLOTS
from cs_proto.descriptors import DTYPES
from cs_proto.frozen import frozen

__all__ = ["PAGE_NBYTES", "Addresses", "divided", "pages"]

#: Reservations are multiples of this, a huge page.
PAGE_NBYTES = 2 << 20
# A slab may have holes, so it may become longer than the machine's memory.
_MOST = 4
# The budget has room for this many optimizers, each with as many slots as any rule has.
_OPTIMIZERS = 16
_CONTROL_NBYTES = 8 << 30
_VERSIONS_NBYTES = 8 << 30


@frozen
class Addresses:
    """Reservations in bytes, each a multiple of ``PAGE_NBYTES``. ``slab`` is the first length of a slab and of each
    segment beside it, ``longest_slab`` the greatest."""

    slab: int
    longest_slab: int
    arena: int
    control: int
    versions: int


def divided(budget: int, machine_nbytes: int, replicas: int) -> Addresses:
    """The division of ``budget`` bytes of addresses, on a machine with ``machine_nbytes`` bytes of memory."""
    optimizable = sum(dtype.startswith(("float", "complex")) for dtype in DTYPES)
    slots = _OPTIMIZERS * max(map(len, SLOTS.values()))
    # The slab of every dtype. Dtypes that can be optimized also have slots, two sets of gradients for each replica, and
    # the slab of sparse variables with its slots.
    count = len(DTYPES) + optimizable * (2 * replicas + slots + 1 + slots)
    longest = pages(_MOST * machine_nbytes)
    arenas = replicas + 3  # the server's, the controller's, and the controller's inputs
    return Addresses(
        slab=min(longest, _whole(budget // 2 // count)),
        longest_slab=longest,
        arena=min(pages(machine_nbytes), _whole(budget // 4 // arenas)),
        control=min(_CONTROL_NBYTES, _whole(budget // 16)),
        versions=min(_VERSIONS_NBYTES, _whole(budget // 32)),
    )


def pages(nbytes: int) -> int:
    """``nbytes``, rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _whole(nbytes: int) -> int:
    """``nbytes``, rounded down to whole pages, and at least one page."""
    return max(1, nbytes // PAGE_NBYTES) * PAGE_NBYTES
