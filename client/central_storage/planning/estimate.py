"""One run of a script up to its first step, and the estimates of its strategies.

``cs-ctl estimate`` calls :func:`estimates`. The script's processes say what they have planned in a file that has no
name and ends with this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from central_storage.launch.packages import python_path
from central_storage.launch.parent_death import end_with_parent
from central_storage.optimizers.table import default_of
from cs_proto.arithmetic.optimizers import OPTIMIZERS
from cs_proto.errors import ConfigurationError
from cs_proto.frozen import frozen
from cs_proto.messages import VariableSpec

from .ending import ENVIRONMENT, PLACES, Elsewhere
from .plan import Optimizer, Plan, planned

__all__ = ["Estimate", "Outcome", "estimates", "rule_of_class", "tried"]

# Seconds that the script may take to end after its first step, and after SIGTERM.
_GRACE = 10.0
_AFTER_TERM = 5.0
_LOOK_EVERY = 0.05


@frozen
class Estimate:
    """What one strategy has planned, and the memory that was available when its script reached the first step."""

    plan: Plan
    #: Bytes while the variables are made: a value passes through an arena on its way to the server.
    start: int
    available: int
    #: Their number.
    optimizers: int
    #: Bytes of the arguments of the first step, of all replicas together.
    arguments: int


@frozen
class Outcome:
    """How the script ended: the ``reason`` (``step``, ``save``, ``end``; None: it made no strategy), its exit code, and
    whether it had to be killed. ``lines`` are the records that its processes left."""

    reason: str | None
    code: int
    was_killed: bool
    lines: tuple[Mapping[str, Any], ...]


def rule_of_class(kind: str) -> str:
    """The rule of an optimizer of this class with default arguments. Raises ConfigurationError for an unknown class."""
    known = {name.lower().replace("_", ""): name for name in OPTIMIZERS}
    name = known.get(kind.lower().replace("_", ""))
    if name is None:
        plain = ", ".join(name for name in OPTIMIZERS if "." not in name)
        raise ConfigurationError(
            f"--optimizer {kind}: there is no such optimizer; there are {plain}, and torch.Adam, optax.adam and so on"
        )
    return default_of(name).rule


def estimates(outcome: Outcome, rule: str | None) -> list[Estimate]:
    """The estimates of all strategies that were open at the end, in the order in which they were made. ``rule``: as if
    each optimizer followed it."""
    found = [plan for line in outcome.lines for plan in line["plans"]]
    return [_estimate(plan, rule) for plan in [each for each in found if not each["is_closed"]] or found]


def _estimate(found: Mapping[str, Any], rule: str | None) -> Estimate:
    specs = {
        number: VariableSpec(name, dtype, tuple(shape), trainable, 0, 0, sparse=sparse)
        for number, name, dtype, shape, trainable, sparse in found["variables"]
    }
    optimizers = [
        Optimizer(rule or each["rule"], None if each["members"] is None else frozenset(each["members"]))
        for each in found["optimizers"]
    ]
    plan = planned(
        specs,
        optimizers,
        found["devices"],
        found["parameter_device"],
        arenas=found["arenas"],
        lanes=len(os.sched_getaffinity(0)),
    )
    start = plan.parameters + found["largest_value"]
    return Estimate(plan, start, found["available"], len(optimizers), found["arguments"])


def tried(
    arguments: Sequence[str], devices: str | None, parameter_device: str | None, elsewhere: Elsewhere | None = None
) -> Outcome:
    """Run the script (``["train.py", "--rate", "0.1"]`` or ``["-m", "package"]``) up to its first step, in a process of
    its own. What it prints goes to stderr. Its processes get ``devices`` in place of those that the script names, and
    see the workers ``elsewhere``."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        named = {"CS_DEVICES": devices, "CS_PARAMETER_DEVICE": parameter_device}
        path = python_path(os.environ)
        environment = {
            **{name: value for name, value in os.environ.items() if name != "CS_ADDRESS"},
            **{name: value for name, value in named.items() if value},
            **({"PYTHONPATH": path} if path else {}),
            **({} if elsewhere is None else {PLACES: elsewhere.to_json()}),
            # Whoever opens it gets a file of its own, also a process that the script starts.
            ENVIRONMENT: f"/proc/{os.getpid()}/fd/{file.fileno()}",
        }
        child = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            env=environment,
            stdout=sys.stderr.fileno(),
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL),
        )
        try:
            was_killed = _wait(child, lambda: _is_reached(file.fileno(), child.pid))
        except BaseException:  # Ctrl-C, which the script has got, too
            _end(child)
            raise
        lines = _lines(file.fileno())
    reasons = [line["reason"] for line in lines]
    reason = next((each for each in ("step", "save", "end") if each in reasons), None)
    return Outcome(reason, child.returncode, was_killed, tuple(line for line in lines if line["reason"] == reason))


def _lines(descriptor: int) -> list[Mapping[str, Any]]:
    """The records that are whole."""
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def _is_reached(descriptor: int, pid: int) -> bool:
    """Whether the script has come to its end. That a process which it has started has ended says nothing."""
    return any(line["reason"] != "end" or line["pid"] == pid for line in _lines(descriptor))


def _wait(child: subprocess.Popen[bytes], is_reached: Callable[[], bool]) -> bool:
    """Wait for the end of the script; end it if it goes on for long after its first step. Whether that was needed."""
    deadline: float | None = None
    while True:
        try:
            child.wait(_LOOK_EVERY)
        except subprocess.TimeoutExpired:
            pass
        else:
            return False
        if deadline is None and is_reached():
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            _end(child)
            return True


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        child.send_signal(number)
        try:
            child.wait(_AFTER_TERM)
        except subprocess.TimeoutExpired:
            continue
        return
    child.wait()
