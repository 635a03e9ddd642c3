"""Workers on another machine, over a network of its own: the same bits at a low rate, and after the network was down.

Two network namespaces stand for the machines: one for the script, the server and the gateway, one for both workers. A
pair of interfaces joins them, with a token bucket at both ends. Making them takes the rights of root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.timing import unit
from tests.processes.test_outposts import PARTS, STEPS, Door, Machines, alone, ends_well, keys, program, stack

__all__ = ["alone", "keys", "program", "stack"]

_HEAD, _NODE = "10.203.0.1", "10.203.0.2"


def _why_not() -> str:
    """Why no namespace can be made here, or nothing."""
    if missing := [command for command in ("ip", "tc") if shutil.which(command) is None]:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    name = f"cs-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Network:
    """Two namespaces and the link between them."""

    def __init__(self, stack: ExitStack, rate: str) -> None:
        mark = secrets.token_hex(3)
        self._head, self._node = f"cs-{mark}-head", f"cs-{mark}-node"
        for name in (self._head, self._node):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        self._link = f"vn{mark}"
        ends = ((self._head, f"vh{mark}", _HEAD), (self._node, self._link, _NODE))
        names = ("link", "add", ends[0][1], "netns", ends[0][0], "type", "veth", "peer", "name")
        _run("ip", *names, ends[1][1], "netns", ends[1][0])
        for name, link, address in ends:
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            for each in ("lo", link):
                _run("ip", "-n", name, "link", "set", each, "up")
            bucket = ("rate", rate, "burst", "64kb", "latency", "200ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *bucket)

    def launchers(self) -> list[tuple[str, ...]]:
        """The beginnings of commands on the machine of the service, and on that of both outposts."""
        launch = str(Path(sys.executable).with_name("cs-launch"))
        return [("ip", "netns", "exec", name, launch) for name in (self._head, self._node, self._node)]

    def drop(self) -> None:
        """Have the machine of the service answer nothing that the other one sends."""
        _run("ip", "-n", self._head, "route", "add", "blackhole", f"{_NODE}/32")

    def set_link(self, state: str) -> None:
        """Take the link of the outposts ``down`` or ``up``."""
        _run("ip", "-n", self._node, "link", "set", self._link, state)


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if why := _why_not():
        pytest.skip(why)


@pytest.fixture
def network(stack: ExitStack) -> Network:
    return Network(stack, "100mbit")


def test_every_part_of_a_training_has_the_bits_of_one_machine(
    stack: ExitStack, network: Network, keys: Path, program: Path, alone: dict[str, str]
) -> None:
    machines = Machines(stack, keys, program, ",".join(PARTS), str(STEPS), launchers=network.launchers(), host=_HEAD)
    ends_well(machines, machines.both(), alone)


@pytest.mark.parametrize("seconds", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (10, 30, 90))])
def test_a_network_that_was_down_changes_no_bit(
    stack: ExitStack,
    network: Network,
    keys: Path,
    program: Path,
    alone: dict[str, str],
    tmp_path: Path,
    seconds: int,
) -> None:
    door = Door(tmp_path / "door", 6)
    words = (program, "dense", str(STEPS), *door.words)
    machines = Machines(
        stack, keys, *words, options=("--return-timeout", "200"), launchers=network.launchers(), host=_HEAD
    )
    outposts = machines.both()
    machines.head.wait_for("at the door")
    network.set_link("down")
    door.open()
    with pytest.raises(AssertionError, match="did not print"):  # the steps need what the workers compute
        machines.head.wait_for("^dense ", timeout=seconds)
    network.set_link("up")
    machines.head.wait_for("^dense ", timeout=unit(100))
    assert "ended by" not in machines.head.err, machines.head.err
    ends_well(machines, outposts, {"dense": alone["dense"]})


def test_a_port_that_is_blocked_is_named(stack: ExitStack, network: Network, keys: Path, program: Path) -> None:
    """The machine of the service drops what the other one sends, as a firewall does."""
    machines = Machines(stack, keys, program, "dense", "1", launchers=network.launchers(), host=_HEAD)
    network.drop()
    ended = machines.outpost(0, None, "--start-timeout", "8").wait(unit(30))
    waiting = f"no gateway answers at {machines.address} yet, and is waited for 4 s: what is sent there gets no answer"
    limit = f"no gateway answered at {machines.address} within 8 s (--start-timeout): what is sent there gets no answer"
    assert (ended.code, waiting in ended.err, limit in ended.err) == (3, True, True), str(ended)
    assert "a firewall drops what is sent to this port" in ended.err
    assert machines.left() == os.listdir(machines.places[0])  # nothing on the other machine


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=os.environ)
