"""Which machine a worker runs on: everybody who is told of a worker is told that, and one machine shows no such thing.

Proxies stand for the machines: each connects to the service from an address of its own."""

from __future__ import annotations

import ast
import json
import signal
from contextlib import ExitStack
from pathlib import Path

from tests.harness.processes import Child, Ended, run, start
from tests.harness.proxies import proxied
from tests.harness.timing import unit
from tests.processes.test_outposts import Door, Machines, joined, keys, stack

__all__ = ["keys", "stack"]

SCRIPT = """
import sys
import central_storage as cs

strategy = cs.CentralStorageStrategy(start_timeout=120)
door, only_at_the_head = sys.argv[1:]

def step(path=None):
    replica = int(cs.get_replica_context().replica_id_in_sync_group)
    if path is not None and replica == 1:
        open(path)
    return replica

def ask():
    try:
        strategy.cluster_resolver
    except RuntimeError as error:
        return str(error)
    return "no error"

def show():
    resolver = strategy.cluster_resolver
    print("spec", None if resolver is None else resolver.cluster_spec().as_dict(), flush=True)
    print("nodes", [each.node for each in strategy.statistics().replicas], flush=True)

strategy.run(step)
show()
print("replica", set(strategy.experimental_local_results(strategy.run(ask))))
try:
    strategy.run(step, args=(only_at_the_head,))
except FileNotFoundError as error:
    print("refused", error, error.__notes__[0].partition(":")[0], flush=True)
with open(door) as opened:
    opened.read()
strategy.run(step)
show()
strategy.run(step, args=(only_at_the_head,))
"""
ONE, TWO, OTHER = "127.0.0.4", "127.0.0.7", "127.0.0.9"


def said(child: Child | Ended, what: str) -> list[object]:
    """The values that the script has printed behind this word."""
    return [ast.literal_eval(line.partition(" ")[2]) for line in child.out.splitlines() if line.startswith(f"{what} ")]


def test_everybody_hears_on_which_machine_a_worker_runs(stack: ExitStack, keys: Path, tmp_path: Path) -> None:
    script, door = tmp_path / "nodes.py", Door(tmp_path / "door", 0)
    script.write_text(SCRIPT)
    machines = Machines(stack, keys, script, door.words[1], "absent.txt")
    proxies = [stack.enter_context(proxied(machines.address, source))[0] for source in (ONE, TWO, OTHER)]
    outposts = [joined(machines.outpost(number, proxies[number]), number) for number in range(2)]
    head = machines.head
    head.wait_for("^refused ")
    pids = [outpost.pid for outpost in outposts]  # a worker elsewhere is shown by its launcher

    # The answer of TensorFlow's names, the counters, and an error in a replica.
    port = machines.address.rpartition(":")[2]
    spec = {"chief": ["127.0.0.1"], "worker": [ONE, TWO], "ps": [f"127.0.0.1:{port}"]}
    assert said(head, "spec") == [spec]
    assert said(head, "nodes") == [[ONE, TWO]]
    assert "answers in the script, and not in a worker" in head.out
    assert (
        f"refused [Errno 2] No such file or directory: 'absent.txt' in replica 1 on {TWO} (merge point 0)" in head.out
    )

    # The supervisor's lines.
    assert f"worker w0 of 2 has joined from {ONE}, 1 to come" in head.err
    assert f"worker w1 of 2 has joined from {TWO}\n" in head.err
    assert f"[supervisor] 2 workers on 2 nodes ({ONE}: w0; {TWO}: w1)\n" in head.err

    # cs-ctl, which does not take the pid of another machine for one of this machine.
    (directory,) = (str(path) for path in Path(machines.places[0]).iterdir())
    status = json.loads(run("cs-ctl", "status", "--json", directory).ok().out)
    workers = [each for each in status["processes"] if each["role"] == "worker"]
    assert [(each["node"], each["pid"], each["private_nbytes"]) for each in workers] == [
        (ONE, pids[0], None),
        (TWO, pids[1], None),
    ]
    assert {each["node"] for each in status["processes"] if each["role"] != "worker"} == {None}
    table = run("cs-ctl", "status", directory).ok().out
    assert [line.split()[:3] for line in table.splitlines() if line.startswith(("PROCESS", "w"))] == [
        ["PROCESS", "PID", "NODE"],
        ["w0.1", str(pids[0]), ONE],
        ["w1.1", str(pids[1]), TWO],
    ]

    missing = json.loads(run("cs-ctl", "stack", "--json", directory).ok().out)["missing"]
    for worker, pid, node in (("w0", pids[0], ONE), ("w1", pids[1], TWO)):
        assert missing[f"{worker} (pid {pid})"].startswith(f"runs on {node}; ")

    place = {"TMPDIR": str(machines.places[0])}
    listed = json.loads(run("cs-ctl", "ls", "--json", environment=place).ok().out)
    assert [each["nodes"] for each in listed if each["address"] == directory] == [[ONE, TWO]]
    lines = run("cs-ctl", "ls", environment=place).ok().out.splitlines()
    assert [" on 2 nodes " in line for line in lines if line.split()[-1] == directory] == [True]

    # Another machine takes the place of one that is lost.
    outposts[1].signal(signal.SIGKILL)
    outposts[1].wait()
    outposts[1] = joined(machines.outpost(1, proxies[2]), 1)
    head.wait_for(rf"worker w1 \(pid {pids[1]} on {TWO}\) ended by the end of its connection", stream="err")
    door.open()
    ended = head.wait(unit(60))
    assert said(ended, "spec") == [spec, spec | {"worker": [ONE, OTHER]}]
    assert said(ended, "nodes") == [[ONE, TWO], [ONE, OTHER]]
    assert ended.code == 1
    assert f"in replica 1 on {OTHER} (merge point 0)" in ended.err
    assert f" on {OTHER}) raised FileNotFoundError: [Errno 2] No such file or directory: 'absent.txt'" in ended.err


def test_one_machine_has_no_nodes(tmp_path: Path) -> None:
    script, door = tmp_path / "nodes.py", Door(tmp_path / "door", 0)
    script.write_text(SCRIPT)
    with start("cs-launch", "--devices", "cpu:0,cpu:1", script, door.words[1], "absent.txt") as child:
        child.wait_for("^refused ")
        assert said(child, "spec") == [None]
        assert "replica {'no error'}" in child.out
        assert "'absent.txt' in replica 1 (merge point 0)" in child.out
        assert said(child, "nodes") == [["", ""]]
        directory = child.wait_for(r"directory (\S+)", stream="err")[1]
        table = run("cs-ctl", "status", directory).ok().out
        assert "NODE" not in table
        door.open()
        assert child.wait(unit(60)).code == 1
