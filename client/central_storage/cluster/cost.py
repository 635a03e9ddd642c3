"""What a step costs over a network: the formulas of what is built, and of a ring for comparison.

Pure: seconds, bytes, and bytes a second. ``cs-launch --plan`` prints them for a script, and the documentation has its
tables from them.

N replicas run on M nodes, with at most g on one of them. V are the bytes of dense variables that a step changes, R the
bytes of table rows that one replica looks up and updates, and B is the rate of the head's network card in each
direction. Parts of a step follow each other, so a time is a sum: computation in the replicas comes on top, and hides
nothing. Measured steps took longer. All replicas are counted as if they ran on other machines than the variables.

There is one process with the variables. The workers of one ``cs-launch --join`` have a link and a copy of the variables
together, so V travels once to every node, and once back from every worker. With ``--ray``, each worker has a link and a
copy of its own, so M is N there, unless ``--workers-per-node`` is given. All links end in one process at the head,
whose messages one thread encrypts.
"""

from __future__ import annotations

import math

from cs_proto.frozen import frozen

__all__ = [
    "CONTROL",
    "CONTROL_HERE",
    "CONTROL_HERE_REPLICA",
    "CONTROL_LINK",
    "CONTROL_REPLICA",
    "CURVE",
    "HOP",
    "ROWS",
    "UPDATE",
    "UPDATE_REPLICA",
    "Cost",
    "all_gather",
    "all_to_all",
    "control",
    "control_here",
    "dense",
    "plain_rate",
    "replicas_within",
    "ring",
    "ring_is_better_from",
    "rows",
    "sealed_rate",
]

# Measured on two cores of one machine, in medians; docs/performance.md has the benchmarks of updates.

# The next five are the lines that `python benchmarks/cluster.py --works empty-run` printed: those that come nearest to
# empty runs of 1, 2 and 4 workers. All processes shared two cores then, those of the nodes, too.
#: Seconds of a run without variables on one machine: of the script and the server, and of each replica.
CONTROL_HERE, CONTROL_HERE_REPLICA = 0.38e-3, 0.14e-3
#: The same with replicas on other machines. Each link adds what the processes at its ends take to pass messages on.
CONTROL, CONTROL_LINK, CONTROL_REPLICA = 1.89e-3, 0.54e-3, 0.78e-3
#: Seconds of one hop between neighbours of a ring.
HOP = 0.10e-3
#: Seconds a byte of an Adam step of the server: of the variables, and of each gradient. Others write fewer slots.
UPDATE, UPDATE_REPLICA = 0.154e-9, 0.0464e-9
#: Seconds a byte of rows and of each replica: they are added up, updated by Adam, and written.
ROWS = 0.85e-3 / 2.1e6
#: Bytes a second that one thread encrypts, or decrypts, with CURVE (0.5e9 to 0.97e9 over loopback).
CURVE = 0.9e9


@frozen
class Cost:
    """Seconds of one step, by what takes them."""

    #: Bytes pass the network.
    network: float
    #: The server adds up gradients and applies the rule.
    update: float
    #: Messages that carry no variables. 0 for a ring, whose hops are part of ``network``.
    control: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.network + self.update + self.control


def plain_rate(bits: float) -> float:
    """Bytes a second at so many bits a second, unencrypted.

    >>> plain_rate(10e9)
    1250000000.0
    """
    return bits / 8


def sealed_rate(bits: float) -> float:
    """Bytes a second at the head, where one thread encrypts: B = min(bits / 8, :data:`CURVE`).

    >>> sealed_rate(1e9), sealed_rate(10e9)
    (125000000.0, 900000000.0)
    """
    return min(plain_rate(bits), CURVE)


def control(replicas: int, links: int | None = None) -> float:
    """Seconds of a step without bytes: 1.89 ms + 0.54 ms * M + 0.78 ms * N. The server hears every replica.

    ``links`` is M, the number of nodes that have a link and a copy of the variables; None: each replica has one.

    >>> f"{control(2):.6f} {control(64):.6f} {control(64, 8):.6f}"
    '0.004530 0.086370 0.056130'
    """
    return CONTROL + CONTROL_LINK * (replicas if links is None else links) + CONTROL_REPLICA * replicas


def control_here(replicas: int) -> float:
    """The same with all replicas on the machine of the server: 0.38 ms + 0.14 ms * N."""
    return CONTROL_HERE + CONTROL_HERE_REPLICA * replicas


def dense(replicas: int, nbytes: float, rate: float, copies: int | None = None) -> Cost:
    """A step that changes ``nbytes`` (V) of dense variables at a ``rate`` of :func:`sealed_rate`, as it is built.
    ``copies`` is M, the number of nodes that have a copy of the variables; None: each replica has one.

    network (M + N) * V / B: V goes to every node, and V comes from every replica. The sum in replica order gives the
    bits of one machine. update (0.154 + 0.046 * N) ms/MB * V.

    >>> [f"{dense(8, 16e6, sealed_rate(1e9), nodes).network:.3f}" for nodes in (8, 2, 1)]
    ['2.048', '1.280', '1.152']
    """
    travels = ((replicas if copies is None else copies) + replicas) * nbytes
    return Cost(travels / rate, (UPDATE + UPDATE_REPLICA * replicas) * nbytes, control(replicas, copies))


def rows(replicas: int, nbytes: float, rate: float, links: int | None = None) -> Cost:
    """A step in which each replica looks up and updates ``nbytes`` (R) of rows, as it is built. ``links`` is M, as for
    :func:`control`.

    network 2 * N * R / B: rows go out, and gradients of rows come in. update 0.40 ms/MB * N * R. The height of the
    table does not matter.
    """
    return Cost(2 * replicas * nbytes / rate, ROWS * replicas * nbytes, control(replicas, links))


def ring(nodes: int, per_node: int, nbytes: float, rate: float) -> Cost:
    """The same dense step by a ring all-reduce between ``nodes`` with ``per_node`` replicas each.

    network 2 * (M - 1) / M * V / B + 2 * (M - 1) * 0.1 ms. Rings do not encrypt, so B is :func:`plain_rate`. update
    (0.154 + 0.046 * g) ms/MB * V on every node, which also holds all variables and slots.

    >>> f"{ring(4, 1, 100e6, plain_rate(10e9)).network:.4f}"
    '0.1206'
    """
    network = 2 * (nodes - 1) / nodes * nbytes / rate + 2 * (nodes - 1) * HOP
    return Cost(network, (UPDATE + UPDATE_REPLICA * per_node) * nbytes)


def all_gather(nodes: int, per_node: int, nbytes: float, rate: float) -> Cost:
    """The step of :func:`rows` where every node holds the whole table and gets the rows of all replicas.

    network (N - g) * R / B + (M - 1) * 0.1 ms, unencrypted. update 0.40 ms/MB * N * R on every node.
    """
    replicas = nodes * per_node
    network = (replicas - per_node) * nbytes / rate + (nodes - 1) * HOP
    return Cost(network, ROWS * replicas * nbytes)


def all_to_all(nodes: int, per_node: int, nbytes: float, rate: float) -> Cost:
    """The step of :func:`rows` where the table is divided among the nodes, each of which serves its part.

    network 2 * g * (M - 1) / M * R / B + 2 * (M - 1) * 0.1 ms, unencrypted. update 0.40 ms/MB * g * R.
    """
    network = 2 * per_node * (nodes - 1) / nodes * nbytes / rate + 2 * (nodes - 1) * HOP
    return Cost(network, ROWS * per_node * nbytes)


def ring_is_better_from(
    nbytes: float, bits: float, per_node: int = 1, most: int = 1024, *, is_shared: bool = True
) -> int | None:
    """The smallest number of nodes, from 2 on, at which :func:`ring` takes less time than :func:`dense`; None if there
    is none up to ``most`` nodes. ``is_shared``: the replicas of a node share a copy of the variables.

    >>> ring_is_better_from(100e6, 10e9)
    2
    """
    for nodes in range(2, most + 1):
        central = dense(nodes * per_node, nbytes, sealed_rate(bits), nodes if is_shared else None).total
        if ring(nodes, per_node, nbytes, plain_rate(bits)).total < central:
            return nodes
    return None


def replicas_within(seconds: float, nbytes: float, rate: float) -> int:
    """How many replicas one head feeds with ``nbytes`` of rows each (R) in so many seconds of network, as while they
    compute: B * t / (2 * R).

    >>> [replicas_within(0.05, 1e6, sealed_rate(bits)) for bits in (1e9, 10e9)]
    [3, 22]
    """
    return math.floor(seconds * rate / (2 * nbytes))
