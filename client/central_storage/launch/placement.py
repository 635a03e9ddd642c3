"""What a run asks of Ray: where Ray is, how many workers, what each of them needs, and how they are spread over nodes.

Pure. ``ray_options`` reads it from the command line, and the placer (:mod:`central_storage.ray.placer`) carries it out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cs_proto.errors import ConfigurationError
from cs_proto.frozen import fields_of, frozen
from cs_proto.printable import counted

__all__ = ["Request", "resources_of"]

_LOCAL = re.compile(r"local:([0-9]{1,2})")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# The names that Ray itself gives resources, however a user writes them. Others are the cluster's own.
_OF_RAY = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}


@frozen
class Request:
    """The workers of a run, as Ray is asked for them."""

    #: ``auto`` (the cluster of this machine), ``HOST:PORT``, or ``local:N`` (N pretend nodes on this machine).
    address: str
    workers: int
    #: What each worker needs, as Ray counts it: ``CPU``, ``GPU``, ``memory`` in bytes, and the cluster's own names.
    resources: Mapping[str, float]
    #: Exactly so many workers on each node; None: as they fit.
    per_node: int | None = None
    #: Over as many nodes as possible, and not packed.
    is_spread: bool = False
    #: The path of a YAML file with Ray's runtime environment; "" if there is none.
    runtime_env: str = ""
    #: Seconds until all workers have their places.
    start_timeout: float = 60.0
    #: A cluster on a network may be without authentication.
    without_token: bool = False

    @property
    def pretend_nodes(self) -> int:
        """The number of nodes of a cluster that the run starts itself; 0 if it uses another one."""
        found = _LOCAL.fullmatch(self.address)
        return int(found[1]) if found else 0

    @property
    def strategy(self) -> str:
        """Ray's name of how the bundles are placed."""
        if self.per_node is not None:
            return "STRICT_SPREAD"
        return "SPREAD" if self.is_spread or self.pretend_nodes else "PACK"

    def sizes(self) -> list[int]:
        """How many workers each bundle is for: one, or all workers of a node if their number is given."""
        size = self.per_node or 1
        return [min(size, self.workers - first) for first in range(0, self.workers, size)]

    def bundles(self) -> list[dict[str, float]]:
        """What is reserved together."""
        return [{name: count * amount for name, amount in self.resources.items()} for count in self.sizes()]

    def launchers(self) -> list[tuple[int, int]]:
        """The launchers of workers: for each, the index of the bundle in which it has its place, and how many workers
        it runs, which share a copy of the variables. All of a bundle have one launcher, unless they share a GPU."""
        if not self.resources.get("GPU", 0.0).is_integer():
            return [(bundle, 1) for bundle, size in enumerate(self.sizes()) for _ in range(size)]
        return list(enumerate(self.sizes()))

    def pretend_resources(self) -> dict[str, float]:
        """What each pretend node says it has: enough for its share of the workers."""
        share = self.per_node or math.ceil(self.workers / self.pretend_nodes)
        return {name: math.ceil(share * amount) for name, amount in self.resources.items()}

    def lacking(self, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
        """What is missing, in a sentence. ``nodes`` have these resources each, and ``free`` are those of the whole
        cluster that nobody uses.

        >>> Request("auto", 8, {"CPU": 1.0}).lacking([{"CPU": 2.0}, {"CPU": 4.0}], {"CPU": 5.0})
        '8 workers need CPU 8, but the cluster has CPU 6 (5 free) on 2 nodes'
        """
        bundles = self.bundles()
        where = counted(len(nodes), "node")
        if self.per_node is not None and len(nodes) < len(bundles):
            nodes_needed = f"{counted(len(bundles), 'node')} for {self.per_node} each"
            return f"{self.workers} workers need {nodes_needed}, but the cluster has {where}"
        missing = []
        for name, amount in self.resources.items():
            asked, total = amount * self.workers, sum(node.get(name, 0) for node in nodes)
            if min(total, free.get(name, 0)) < asked:
                missing.append((name, asked, total, free.get(name, 0)))
        workers = f"{self.workers} workers need" if self.workers > 1 else "1 worker needs"
        if missing:
            need = ", ".join(f"{name} {_number(asked)}" for name, asked, _, _ in missing)
            has = ", ".join(f"{name} {_number(total)} ({_number(rest)} free)" for name, _, total, rest in missing)
            return f"{workers} {need}, but the cluster has {has} on {where}"
        each = ", ".join(f"{name} {_number(amount)}" for name, amount in bundles[0].items())
        what = f"{self.per_node} workers need" if self.per_node else "a worker needs"
        return f"{what} {each} on one node, and no {len(bundles)} such places are free on {where}"

    def to_json(self) -> str:
        """This, for the command line of the placer."""
        values = {name: getattr(self, name) for name in fields_of(type(self))}
        return json.dumps(values | {"resources": dict(self.resources)})

    @classmethod
    def of_json(cls, text: str) -> Request:
        """What :meth:`to_json` has written."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values)


def resources_of(text: str, option: str) -> dict[str, float]:
    """The resources in a text such as ``CPU=4,GPU=1``. ``option`` is named in errors.

    >>> resources_of("cpu=4,GPU=0.5,memory=2e9", "--worker-resources")
    {'CPU': 4.0, 'GPU': 0.5, 'memory': 2000000000.0}

    Raises ConfigurationError for what Ray would not take.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.partition("=")
        name = _OF_RAY.get(name.strip().lower(), name.strip())
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if not equals or not _NAME.fullmatch(name) or not 0 <= amount < 1e15:
            raise ConfigurationError(f"{option} takes NAME=NUMBER,..., such as CPU=4,GPU=1, not {text!r:.200}")
        if name in found:
            raise ConfigurationError(f"{option} names {name} twice: {text!r:.200}")
        if amount > 1 and not amount.is_integer():
            raise ConfigurationError(f"{option}: {name}={number.strip()} is no whole number, and Ray divides only one")
        found[name] = amount
    if not any(found.values()):
        raise ConfigurationError(f"{option} must name something that a worker needs, such as CPU=1")
    return {name: amount for name, amount in found.items() if amount}


def _number(amount: float) -> str:
    return f"{amount:.12g}"
