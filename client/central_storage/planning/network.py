"""The plan of a training on several machines: ``python -m central_storage.planning.network``, for ``cs-launch --plan``.

It runs the script up to its first step, as ``cs-ctl estimate`` does, and prints what would lie where, the bytes of a
step, its time by the formulas of :mod:`central_storage.cluster.cost`, and the time of a ring for the same bytes. The
launcher has found out before where the workers would run.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from collections.abc import Sequence

from central_storage.cluster import cost
from central_storage.cluster.cost import Cost
from central_storage.cluster.session import ENVELOPE_NBYTES, MOST_UNHEARD
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen
from cs_proto.printable import counted, printable
from cs_proto.sizes import rounded

from .ending import Elsewhere
from .estimate import Estimate, Outcome, estimates, tried

__all__ = ["Request", "lines", "main"]

_FITS, _TOO_LARGE, _USAGE_ERROR = 0, 1, 2
# The rates of networks in the table, in bits a second.
_RATES = (1e9, 10e9, 25e9, 100e9)
# More nodes are counted, and not listed.
_LISTED = 12
# A training step of this length is an example, in seconds.
_COMPUTATION = 0.05
_MB = 1_000_000
# The most bytes of variables that are copied for one link at a time: the session keeps its envelopes, and ZeroMQ has
# copied them, too.
_COPIED_NBYTES = 2 * MOST_UNHEARD * ENVELOPE_NBYTES


@frozen
class Request:
    """What the launcher has found out, and what the user asks for."""

    script: tuple[str, ...]
    devices: str | None
    parameter_device: str | None
    #: The rate of the head's network card, in bits a second, and whether nobody has said it.
    bits: float
    is_assumed: bool
    #: For each worker, a name of its node that no other node has, and its address; empty if all run here.
    nodes: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    #: The address of this machine, where it is known.
    head: str = ""
    #: What is known of the cluster, in words.
    cluster: str = ""
    #: Whether the workers of a node share a copy of the variables.
    is_shared: bool = False

    @classmethod
    def of_json(cls, text: str) -> Request:
        """What the launcher has written."""
        said = json.loads(text)
        for name in ("script", "nodes", "addresses"):
            said[name] = tuple(said[name])
        return cls(**said)

    @property
    def machines(self) -> int:
        """The number of nodes of the workers."""
        return len(set(self.nodes))

    @property
    def most_on_a_node(self) -> int:
        """The workers of the node that has most of them."""
        return max(Counter(self.nodes).values(), default=0)

    @property
    def copies(self) -> int:
        """How many copies of the variables there are on the nodes."""
        return self.machines if self.is_shared else len(self.nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. 0: it fits; 1: it does not fit; 2: there is nothing to plan; else the code with which the script
    has failed before its first step."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    request = Request.of_json(text)
    script = " ".join(request.script)
    _say(f"{script} runs up to its first step, with all that it does before; its output follows")
    head = request.head or socket.gethostname()
    listen = f"tcp://{f'[{head}]' if ':' in head else head}:0"
    elsewhere = Elsewhere(listen, request.addresses) if request.nodes else None
    try:
        outcome = tried(request.script, request.devices, request.parameter_device, elsewhere)
        found = _checked(outcome, script)
    except ConfigurationError as error:
        print(printable(f"cs-launch: error: {error}", lines=True), file=sys.stderr)
        return _USAGE_ERROR
    if not found:
        _say(f"the script failed before its first step (exit code {outcome.code})")
        return outcome.code if 0 < outcome.code < 256 else _TOO_LARGE
    for number, each in enumerate(found):
        for line in [*([""] if number else []), *lines(request, each)]:
            print(printable(line))
    return _TOO_LARGE if any(_missing(request, each) for each in found) else _FITS


def _checked(outcome: Outcome, script: str) -> list[Estimate]:
    """What the strategies of the script have planned; nothing if it has failed."""
    if outcome.reason in (None, "end") and outcome.code != 0:
        return []
    if outcome.reason is None:
        raise ConfigurationError(f"{script} has ended and has made no CentralStorageStrategy: there is nothing to plan")
    if outcome.reason == "end":
        _say("no step came: the script ended by itself, and this is what it had planned until then")
    return estimates(outcome, None)


def _say(text: str) -> None:
    print(printable(f"[cs-launch] {text}"), file=sys.stderr, flush=True)


def lines(request: Request, estimate: Estimate) -> list[str]:
    """The plan of one strategy."""
    if not request.nodes:
        return _on_one_machine(estimate)
    return [*_places(request, estimate), "", *_bytes(request, estimate), "", *_times(request, estimate)]


# --- places -----------------------------------------------------------------------------------------------------------


def _places(request: Request, estimate: Estimate) -> list[str]:
    """What would lie where, and whether it fits at the head."""
    plan = estimate.plan
    workers, nodes = len(request.nodes), request.machines
    head = request.head or "this machine"
    what = f"{counted(workers, 'worker')} on {counted(nodes, 'node')}, variables on {plan.parameter_device} of {head}"
    counts = Counter(request.nodes)
    address = dict(zip(request.nodes, request.addresses, strict=True))
    rows = [(f"{head} (head)", "script, server, gateway", rounded(_head_nbytes(request, estimate)))]
    for node, count in list(counts.items())[:_LISTED]:
        name = node if address[node] == "elsewhere" else address[node]
        rows.append((name, counted(count, "worker"), rounded(_node_nbytes(request, estimate, count))))
    rest = list(counts.values())[_LISTED:]
    if rest:
        most = rounded(_node_nbytes(request, estimate, max(rest)))
        rows.append((f"{len(rest)} more", counted(sum(rest), "worker"), f"up to {most} each"))
    copies = rounded(_waiting_nbytes(request, estimate))
    missing = _missing(request, estimate)
    has = f"{rounded(estimate.available)} available"
    return [
        f"plan: {what}",
        *([request.cluster] if request.cluster else []),
        *_table(("WHERE", "WHAT", "SHARED MEMORY"), rows, right=(2,)),
        f"at the head: {plan.described()}, arenas and other {rounded(plan.arenas + plan.other)}, and up to {copies} of "
        "copies that wait to be sent",
        f"does not fit at the head: {rounded(missing)} too much, {has}" if missing else f"fits at the head: {has}",
        f"each {_with_a_copy(request)}: a copy of the variables ({rounded(plan.mirrored)}), "
        f"{'and of each worker ' if request.is_shared else ''}its gradients ({rounded(plan.gradients)}) and its "
        "arguments; what the nodes have is not looked at",
    ]


def _head_nbytes(request: Request, estimate: Estimate) -> int:
    """What the service takes there, and the copies of variables that wait for the links."""
    return estimate.plan.nbytes + _waiting_nbytes(request, estimate)


def _waiting_nbytes(request: Request, estimate: Estimate) -> int:
    """The most bytes of copies that wait to be sent. The rest is read in the segments when its turn comes."""
    return request.copies * min(estimate.plan.gradients, _COPIED_NBYTES)


def _node_nbytes(request: Request, estimate: Estimate, workers: int) -> int:
    """What a node with so many workers has."""
    copies = 1 if request.is_shared else workers
    of_each = estimate.plan.gradients + estimate.arguments // len(request.nodes)
    return copies * estimate.plan.mirrored + workers * of_each


def _with_a_copy(request: Request) -> str:
    return "node" if request.is_shared else "worker"


def _missing(request: Request, estimate: Estimate) -> int:
    """Bytes that the head lacks; 0 if it has all."""
    needed = _head_nbytes(request, estimate) if request.nodes else estimate.plan.nbytes
    return max(0, max(needed, estimate.start) - estimate.available)


# --- bytes and times --------------------------------------------------------------------------------------------------


def _bytes(request: Request, estimate: Estimate) -> list[str]:
    """What a step sends."""
    workers, nbytes = len(request.nodes), estimate.plan.gradients
    share = rounded(estimate.arguments // workers)
    here = 0 if request.head.startswith("127.") else request.addresses.count(request.head)
    others = (
        "the workers of a node share its copy"
        if request.is_shared
        else "each worker has a copy of its own, also where several are on one node"
    )
    return [
        f"a step sends each {_with_a_copy(request)} {rounded(nbytes)} of variables"
        f"{', each worker ' if request.is_shared else ' and '}{share} of arguments, and takes {rounded(nbytes)} of "
        f"gradients from {'each worker' if request.is_shared else 'it'}",
        f"through the network card of the head: {rounded(request.copies * nbytes + estimate.arguments)} out, "
        f"{rounded(workers * nbytes)} in; {others}",
        *([f"{here} of the workers are at the head itself, so less than that passes its card"] if here else []),
    ]


def _step(request: Request, estimate: Estimate, bits: float) -> Cost:
    """A step as it is built, with its arguments."""
    rate = cost.sealed_rate(bits)
    dense = cost.dense(len(request.nodes), estimate.plan.gradients, rate, request.copies)
    return Cost(dense.network + estimate.arguments / rate, dense.update, dense.control)


def _ring(request: Request, estimate: Estimate, bits: float) -> Cost:
    """Nodes that read their own data, so no arguments travel."""
    rate = cost.plain_rate(bits)
    return cost.ring(request.machines, request.most_on_a_node, estimate.plan.gradients, rate)


def _times(request: Request, estimate: Estimate) -> list[str]:
    """The predicted times at several rates, and the same by a ring."""
    rows = []
    for bits in sorted({*_RATES, request.bits}):
        step, ring = _step(request, estimate, bits), _ring(request, estimate, bits)
        mark = " *" if bits == request.bits else ""
        parts = (step.network, step.update, step.control, step.total)
        by_ring = _time(ring.total) if estimate.plan.gradients else "-"
        rate = f"{rounded(round(cost.sealed_rate(bits)))}/s"
        rows.append((f"{bits / 1e9:g} Gbit/s{mark}", rate, *map(_time, parts), by_ring))
    columns = ("NETWORK", "ENCRYPTED", "BYTES", "UPDATE", "MESSAGES", "A STEP", "BY A RING")
    source = "assumed: --bandwidth names another" if request.is_assumed else "--bandwidth"
    return [
        f"predicted times of a step, without computation in the replicas (* {source})",
        *_table(columns, rows, right=range(1, 7)),
        *_comparison(request, estimate),
        *(_of_tables(request, estimate) if estimate.plan.sparse else []),
        "not counted: computation, results, reads of tables, and variables that change without gradients; the formulas "
        "have been compared with measurements of up to eight workers, and the update is that of Adam",
    ]


def _comparison(request: Request, estimate: Estimate) -> list[str]:
    """Whether a ring would be better."""
    if not estimate.plan.gradients:
        return ["no dense variable has gradients, so a ring would have nothing to do"]
    step, ring = (of(request, estimate, request.bits).total for of in (_step, _ring))
    if ring >= step:
        return [f"a ring all-reduce would take {_time(ring)}, and is not faster"]
    most, is_shared = request.most_on_a_node, request.is_shared
    nodes = cost.ring_is_better_from(estimate.plan.gradients, request.bits, most, is_shared=is_shared)
    where = "" if nodes is None else f", and so it is from {counted(nodes, 'node')} on"
    return [
        f"a ring all-reduce would take {_time(ring)} instead of {_time(step)}: it is faster here{where}. It is not "
        "encrypted, every node holds all variables and slots, and a node that dies ends it",
    ]


def _of_tables(request: Request, estimate: Estimate) -> list[str]:
    """What rows cost. How many a step looks up is known when it runs."""
    workers, nodes, most = len(request.nodes), request.machines, request.most_on_a_node
    sealed, plain = cost.sealed_rate(request.bits), cost.plain_rate(request.bits)
    step = cost.rows(workers, _MB, sealed)
    gathered, divided = (of(nodes, most, _MB, plain) for of in (cost.all_gather, cost.all_to_all))
    tables = rounded(estimate.plan.sparse)
    return [
        f"tables with sparse=True and their slots, up to {tables}, stay at the head, and only rows travel; which ones "
        "a step needs is known when it runs",
        f"each MB of rows of every worker adds {_time(step.network + step.update)} to a step; by all-gather it takes "
        f"{_time(gathered.total)}, with {tables} on every node; by all-to-all {_time(divided.total)}, with a part of "
        "the tables on every node",
        f"while replicas compute for {_time(_COMPUTATION)}, this head feeds "
        f"{counted(cost.replicas_within(_COMPUTATION, _MB, sealed), 'replica')} with 1 MB of rows each",
    ]


def _on_one_machine(estimate: Estimate) -> list[str]:
    """Nothing travels."""
    plan = estimate.plan
    workers, missing = plan.replicas, _missing(Request((), None, None, 0.0, is_assumed=True), estimate)
    update = (cost.UPDATE + cost.UPDATE_REPLICA * workers) * plan.gradients
    control = cost.control_here(workers)
    has = f"{rounded(estimate.available)} available"
    return [
        f"plan: {counted(workers, 'worker')} on this machine ({', '.join(plan.devices)}), variables on "
        f"{plan.parameter_device}; nothing travels over a network",
        f"memory: {plan.described()}, arenas and other {rounded(plan.arenas + plan.other)}; cs-ctl estimate shows "
        "it by process",
        f"does not fit: {rounded(missing)} too much, {has}" if missing else f"fits: {has}",
        f"predicted time of a step, without computation in the replicas: {_time(update + control)} (update "
        f"{_time(update)} as of Adam, messages {_time(control)})",
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def _time(seconds: float) -> str:
    """A time with two or three digits.

    >>> _time(12.34), _time(1.26), _time(0.9996), _time(0.0426), _time(0.00126)
    ('12 s', '1.3 s', '1.0 s', '43 ms', '1.3 ms')
    """
    if seconds >= 0.9995:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.00995 else f"{1000 * seconds:.1f} ms"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:>{width}}" if place in right else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (columns, *rows)
    ]


if __name__ == "__main__":
    sys.exit(main())
