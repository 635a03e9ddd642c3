"""P22: what dies is started again as often as ``--max-restarts`` says, after the pauses that were promised, and never
before the service was up."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

from tests.harness.processes import Ended, run

__all__ = ["any_policy", "kept"]

#: Who dies whenever it comes there, so each one in its place does, too: no pause is saved by work that was done.
_DIES = {"worker w1": "worker.run[1]=exit0", "the server": "server.commit=kill"}
_DIES_AT_THE_START = "server.heard=kill"
#: Seconds before the first, second ... restart of what never works.
_PAUSES = (0, 1, 2, 4, 8, 16, 30, 30)
_START_FAILED = 3

_SCRIPT = """
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    total = cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)
for _ in range(100):
    try:
        strategy.run(lambda: total.assign_add(np.ones(3)))
    except cs.errors.ReplicaLostError as error:
        if "not started again" in str(error) or "make a new CentralStorageStrategy" in str(error):
            raise
"""


def kept(who: str, limit: int) -> list[str]:
    """``who`` dies over and over, ``limit`` restarts are allowed; what is not as promised, in words."""
    ended = _trained(_DIES[who], limit)
    code = 5 if who == "the server" else 4
    found = [] if ended.code == code else [f"the exit code is {ended.code}, not {code}"]
    told = re.findall(rf"\] {who} \(pid \d+\) ended by [^;]*; restart (\d+) of (\d+)(?: in (\d+) s)?$", ended.err, re.M)
    right = [(str(n + 1), str(limit), str(_PAUSES[n] or "")) for n in range(limit)]
    if told != right:
        found.append(f"the restarts of {who} are {told}, not {right}")
    if len(re.findall(rf"\] {who} \(pid \d+\) ended by ", ended.err)) != limit + 1:
        found.append(f"{who} did not die {limit + 1} times")
    if limit and f"it is not started again after {limit} restart" not in ended.err:
        found.append("it is not said that the restarts are used up")
    if ended.seconds < sum(_PAUSES[:limit]):
        found.append(f"it took {ended.seconds:.1f} s, less than the pauses")
    return [f"{what}\n{ended}" for what in found]


def started_once() -> list[str]:
    """The server dies before the service is up: nothing is started again, whatever is allowed."""
    ended = _trained(_DIES_AT_THE_START, 3)
    found = [] if ended.code == _START_FAILED else [f"the exit code is {ended.code}, not {_START_FAILED}"]
    if "the service did not start: the server" not in ended.err:
        found.append("it is not said what kept the service from starting")
    if "; restart " in ended.err:
        found.append("something was started again before the service was up")
    return [f"{what}\n{ended}" for what in found]


def any_policy(rng: random.Random) -> list[str]:
    """One of them."""
    return started_once() if rng.random() < 0.2 else kept(rng.choice(list(_DIES)), rng.randrange(5))


def _trained(failpoints: str, limit: int) -> Ended:
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        script = Path(directory, "train.py")
        script.write_text(_SCRIPT)
        return run(
            *("cs-launch", "--devices", "cpu:0,cpu:1", "--max-restarts", str(limit), script),
            environment={"CS_FAILPOINTS": failpoints},
            timeout=300.0,
        )
