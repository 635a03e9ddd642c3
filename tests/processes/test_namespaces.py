"""Workers and observers on another machine, over a network of its own: the same bits at a low rate, with packets that
are late or lost, and after the network was down.

Two network namespaces stand for the machines: one for the script, the server and the gateway, one for both workers and
an observer. A pair of interfaces joins them, with a token bucket at both ends, or a wire that loses and delays packets.
Making them takes the rights of root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.harness.processes import run, start
from tests.harness.timing import unit
from tests.harness.wires import DEVICE
from tests.processes.test_outposts import PARTS, STEPS, Door, Machines, alone, ends_well, keys, program, stack

from cs_runtime.transport.curve import make_keys

__all__ = ["alone", "keys", "program", "stack"]

_HEAD, _NODE = "10.203.0.1", "10.203.0.2"
# Of the bad network: the probability with which a packet is lost, and how late the others are, in seconds.
_LOSS, _DELAY = "0.1", "0.05"
# How late all packets of a network are that takes long, in seconds: a round trip takes more than two seconds.
_LATE = "1.1"
# Seconds after which all goes on that a network had stopped.
_GOES_ON = 5.0

# The replicas count their steps in a variable, and train another one. Before every third step the script waits.
COUNT = """
import hashlib
import sys

import numpy as np

import central_storage as cs

F32 = np.float32
steps, door = int(sys.argv[1]), sys.argv[2:]
strategy = cs.CentralStorageStrategy(start_timeout=120)
with strategy.scope():
    count = cs.Variable(np.zeros(100, F32), name="count")
    trained = cs.Variable(np.random.default_rng(7).normal(size=1000).astype(F32))
    sgd, adam = cs.optimizers.SGD(1.0), cs.optimizers.Adam(0.01)


def step(number):
    own = np.random.default_rng((int(number), int(cs.get_replica_context().replica_id_in_sync_group)))
    held = np.asarray(trained) * own.normal(size=1000).astype(F32)
    sgd.apply_gradients([(np.full(100, -0.5, F32), count)])
    adam.apply_gradients([(held, trained)])
    return held[::10].copy()


told = hashlib.blake2b(digest_size=12)
for number in range(steps):
    if door and number % 3 == 2:
        print("at the door", number, flush=True)
        with open(door[0]) as opened:  # a named pipe
            opened.read()
    for each in strategy.experimental_local_results(strategy.run(step, args=(number,))):
        told.update(each.tobytes())
    print("step", number, flush=True)
told.update(trained.numpy().tobytes())
print("digest", told.hexdigest(), float(count.numpy().min()), float(count.numpy().max()), flush=True)
"""

OBSERVE = """
import sys

import central_storage as cs

address, keys, door = sys.argv[1:]
with cs.connect(address, 100, keys=keys) as observer:
    while True:
        with open(door) as opened:  # a named pipe: how often to look
            times = int(opened.read())
        if not times:
            break
        for _ in range(times):
            value = observer.get("count")
            print("saw", float(value.min()), float(value.max()), flush=True)
"""


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

    def __init__(self, stack: ExitStack) -> None:
        mark = secrets.token_hex(3)
        self._head, self._node = f"cs-{mark}-head", f"cs-{mark}-node"
        for name in (self._head, self._node):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        self._link = f"vn{mark}"
        ends = ((self._head, f"vh{mark}", _HEAD), (self._node, self._link, _NODE))
        self._join(stack, *ends)
        for name, link, _ in ends:
            for each in ("lo", link):
                _run("ip", "-n", name, "link", "set", each, "up")

    def _join(self, stack: ExitStack, *ends: tuple[str, str, str]) -> None:
        """Make devices of these namespaces, names and addresses, and a link between them."""
        (head, head_link, _), (node, node_link, _) = ends
        names = ("link", "add", head_link, "netns", head, "type", "veth", "peer", "name", node_link, "netns", node)
        _run("ip", *names)
        for name, link, address in ends:
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            bucket = ("rate", "100mbit", "burst", "64kb", "latency", "200ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *bucket)

    def launchers(self) -> list[tuple[str, ...]]:
        """The beginnings of commands on the machine of the service, and on that of both outposts."""
        launch = str(Path(sys.executable).with_name("cs-launch"))
        return [("ip", "netns", "exec", name, launch) for name in (self._head, self._node, self._node)]

    def elsewhere(self, *words: str | Path) -> tuple[str | Path, ...]:
        """The command that has Python run ``words`` on the machine of the outposts."""
        return ("ip", "netns", "exec", self._node, sys.executable, *words)

    def drop(self) -> None:
        """Have the machine of the service answer nothing that the other one sends."""
        _run("ip", "-n", self._head, "route", "add", "blackhole", f"{_NODE}/32")

    def set_link(self, state: str) -> None:
        """Take the link of the outposts ``down`` or ``up``."""
        _run("ip", "-n", self._node, "link", "set", self._link, state)


class BadNetwork(Network):
    """The link loses and delays packets; a seed says which it loses."""

    def __init__(self, stack: ExitStack, seed: int, loss: str = _LOSS, delay: str = _DELAY) -> None:
        self._words = (loss, delay, str(seed))
        super().__init__(stack)

    def _join(self, stack: ExitStack, *ends: tuple[str, str, str]) -> None:
        words = [word for name, link, address in ends for word in (name, link, f"{address}/24")]
        command = (sys.executable, "-m", "tests.harness.wires", *words, *self._words)
        stack.enter_context(start(*command)).wait_for("^ready")


class Watcher:
    """An observer on the machine of the outposts, which looks at how many steps were counted when it is asked to."""

    def __init__(self, stack: ExitStack, network: Network, address: str, keys: Path, directory: Path) -> None:
        there = directory / "watcher"
        make_keys(str(keys / "service"), f"for-{secrets.token_hex(3)}")
        there.mkdir(mode=0o700)
        (there / "service.key").write_bytes((keys / "service" / "service.key").read_bytes())
        secret = next((keys / "service").glob("observer-for-*.key_secret"))
        secret.rename(there / "observer.key_secret")
        self._door = directory / "watched"
        os.mkfifo(self._door)
        words = ("-u", "-c", OBSERVE, address, there, self._door)
        self._child = stack.enter_context(start(*network.elsewhere(*words)))
        self._asked = 0

    def ask(self, times: int) -> None:
        """Have it look so many times. It has seen all that it was asked for before."""
        self._asked += times
        self._door.write_text(str(times))

    def seen(self, timeout: float) -> list[tuple[float, float]]:
        """The least and the greatest element of everything that it has seen so far, once that is all."""
        self._child.wait_for(rf"\A(saw .*\n){{{self._asked}}}", timeout=timeout)
        return [(float(least), float(most)) for _, least, most in map(str.split, self._child.out.splitlines())]

    def end(self) -> None:
        """It ends by itself."""
        self._door.write_text("0")
        self._child.wait().ok()


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    if why := _why_not():
        pytest.skip(why)


@pytest.fixture
def network(stack: ExitStack) -> Network:
    return Network(stack)


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


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counting") / "count.py"
    path.write_text(COUNT)
    return path


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason=f"{DEVICE} cannot be opened")
@pytest.mark.parametrize(
    ("seed", "trials", "seconds"),
    [(0, 1, 1), *(pytest.param(n, 5, 10, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for n in range(1, 7))],
)
def test_a_bad_network_loses_and_doubles_no_update(
    stack: ExitStack, keys: Path, counting: Path, tmp_path: Path, seed: int, trials: int, seconds: int
) -> None:
    """A trial: in a step, and while an observer asks, a network that loses and delays packets is down for a while."""
    steps = 3 * trials + 3
    limit = unit(60) if trials == 1 else 3 * unit(_GOES_ON)  # the bound of P41 is for a machine that does nothing else
    alone = run("cs-launch", "--devices", "cpu:0,cpu:1", counting, str(steps)).ok().lines[-1]
    network, door = BadNetwork(stack, seed), tmp_path / "door"
    os.mkfifo(door)
    words = (counting, str(steps), door)
    machines = Machines(stack, keys, *words, launchers=network.launchers(), host=_HEAD)
    outposts = machines.both()
    watcher = Watcher(stack, network, machines.address, keys, tmp_path)
    for step in range(2, 3 * trials + 2, 3):
        machines.head.wait_for(f"^at the door {step}$", timeout=unit(60))
        watcher.ask(3)
        assert watcher.seen(unit(60))[-3:] == [(step, step)] * 3
        network.set_link("down")
        door.write_text("")
        watcher.ask(1)
        with pytest.raises(AssertionError, match="did not print"):
            machines.head.wait_for(f"^step {step}$", timeout=seconds)
        network.set_link("up")
        begun = time.monotonic()
        machines.head.wait_for(f"^step {step}$", timeout=limit)
        trained = time.monotonic() - begun
        least, most = watcher.seen(limit)[-1]
        assert (least == most, most in range(step, step + 4)) == (True, True)
        print(f"the training went on after {trained:.1f} s, and the observer after {time.monotonic() - begun:.1f} s")
    machines.head.wait_for(f"^at the door {steps - 1}$", timeout=unit(60))
    watcher.ask(1)
    assert watcher.seen(unit(60))[-1] == (steps - 1, steps - 1)
    watcher.end()
    door.write_text("")
    ended = machines.head.wait(unit(60)).ok()
    assert [line for line in ended.lines if line.startswith("step")] == [f"step {number}" for number in range(steps)]
    assert ended.lines[-1] == alone
    assert alone.endswith(f" {float(steps)} {float(steps)}")
    for outpost in outposts:
        outpost.wait().ok()
    assert machines.left() == []


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason=f"{DEVICE} cannot be opened")
def test_an_observer_with_time_connects_over_a_network_that_takes_long(
    stack: ExitStack, keys: Path, counting: Path, tmp_path: Path
) -> None:
    network, door = BadNetwork(stack, 0, "0", _LATE), tmp_path / "door"
    os.mkfifo(door)
    head = network.launchers()[0]
    listen = ("--listen", f"tcp://{_HEAD}:0", "--keys", keys / "service")
    service = stack.enter_context(start(*head, "--devices", "cpu:0,cpu:1", *listen, counting, "3", door))
    address = service.wait_for(r"tcp://[\d.]+:\d+", stream="err").group()
    service.wait_for("^at the door 2$", timeout=unit(60))
    watcher = Watcher(stack, network, address, keys, tmp_path)
    watcher.ask(1)
    assert watcher.seen(unit(60)) == [(2, 2)]
    watcher.end()
    door.write_text("")
    service.wait(unit(60)).ok()


def test_a_port_that_is_blocked_is_named(stack: ExitStack, network: Network, keys: Path, program: Path) -> None:
    """The machine of the service drops what the other one sends, as a firewall does."""
    machines = Machines(stack, keys, program, "dense", "1", launchers=network.launchers(), host=_HEAD)
    network.drop()
    ended = machines.outpost(0, None, "--start-timeout", "8").wait(unit(30))
    waiting = f"no gateway answers at {machines.address} yet; waiting another 4 s: what is sent there gets no answer"
    limit = f"no gateway answered at {machines.address} within 8 s (--start-timeout): what is sent there gets no answer"
    assert (ended.code, waiting in ended.err, limit in ended.err) == (3, True, True), str(ended)
    assert "a firewall drops what is sent to this port" in ended.err
    assert machines.left() == os.listdir(machines.places[0])  # nothing on the other machine


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=os.environ)
