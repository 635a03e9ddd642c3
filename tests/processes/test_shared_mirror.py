"""Several workers of another machine share a copy of the dense variables: the bits are those of one machine, whatever
dies or is cut off."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.harness.processes import Child, run
from tests.harness.proxies import proxied
from tests.harness.timing import unit
from tests.processes.test_outposts import (
    PARTS,
    STEPS,
    Door,
    Machines,
    alone,
    cut_and_mended,
    digests,
    ends_well,
    process_of,
    program,
    stack,
)

from cs_runtime.transport.curve import make_keys

__all__ = ["alone", "program", "stack"]

TWO = ("--devices", "cpu:0,cpu:1")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service, of a machine with two workers, and of one with one."""
    parent = tmp_path_factory.mktemp("keys")
    for name, places in (("a", 2), ("b", 1)):
        make_keys(str(parent / "service"), worker=name, places=places)
        there = parent / name
        there.mkdir(mode=0o700)
        (there / "service.key").write_bytes((parent / "service" / "service.key").read_bytes())
        (parent / "service" / f"worker-{name}.key_secret").rename(there / f"worker-{name}.key_secret")
    return parent


def both(machines: Machines, address: str | None = None, *options: str) -> Child:
    """An outpost that runs both workers of a service."""
    outpost = machines.outpost(0, address, *TWO, *options)
    for number in range(2):
        outpost.wait_for(rf"worker w{number} of 2 on cpu:{number}, for the service behind tcp:", stream="err")
    return outpost


def workers_of(outpost: Child) -> dict[str, psutil.Process]:
    """The workers by name."""
    found = (each for each in outpost.processes()[1:] if "cs_worker" in each.cmdline())
    return {f"w{each.cmdline()[each.cmdline().index('--replica') + 1]}": each for each in found}


def segments_of(process: psutil.Process) -> dict[str, str]:
    """The segments that a process maps: the inode of each."""
    found = re.findall(r" (\d+) +/memfd:cs-(\S+)", Path(f"/proc/{process.pid}/maps").read_text())
    return {name: inode for inode, name in found}


def test_every_part_of_a_training_has_the_bits_of_one_machine(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str]
) -> None:
    machines = Machines(stack, keys, program, ",".join(PARTS), str(STEPS))
    ends_well(machines, [both(machines)], alone)


def test_workers_of_one_machine_map_the_same_variables_and_nothing_else_together(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, "dense", str(STEPS), *door.words)
    outpost = both(machines)
    machines.head.wait_for("at the door")
    first, second = (segments_of(each) for each in workers_of(outpost).values())
    assert "parameters/float32" in first.keys() & second.keys()
    assert {name for name, inode in first.items() if second.get(name) == inode} <= {"parameters/float32", "versions"}
    assert first["parameters/float32"] == second["parameters/float32"]
    door.open()
    ends_well(machines, [outpost], {"dense": alone["dense"]})


SENT = """
import numpy as np

import central_storage as cs

strategy = cs.CentralStorageStrategy(start_timeout=120)
with strategy.scope():
    w = cs.Variable(np.zeros(500_000, np.float32))
    sgd = cs.optimizers.SGD(1.0)

@cs.function
def step():
    sgd.apply_gradients([(np.asarray(w) * 0 - 1, w)])

for _ in range(10):
    strategy.run(step)
print("w", *set(w.numpy()), flush=True)
"""


def test_variables_travel_once_to_a_machine_and_gradients_from_each_worker(
    stack: ExitStack, keys: Path, tmp_path: Path
) -> None:
    program, carried = tmp_path / "sent.py", dict[str, int]()
    program.write_text(SENT)
    machines = Machines(stack, keys, program)
    with proxied(machines.address, carried=carried) as (address, _, _):
        outpost = both(machines, address)
        assert machines.head.wait(unit(60)).ok().lines[-1] == "w 20.0"
        outpost.wait().ok()
    nbytes = 500_000 * 4
    assert 9 * nbytes < carried["down"] < 13 * nbytes, carried
    assert 20 * nbytes < carried["up"] < 23 * nbytes, carried


def test_three_workers_on_two_machines(stack: ExitStack, keys: Path, program: Path) -> None:
    """The machine with one worker joins first, so places and ranks differ."""
    parts = "dense,rows,points,lifetimes"
    expected = digests(run("cs-launch", "--devices", "cpu:0,cpu:1,cpu:2", program, parts, "8", timeout=unit(120)))
    machines = Machines(stack, keys, program, parts, "8", workers=3)
    one = machines.outpost(1)
    one.wait_for("worker w0 of 3 on cpu:0, ", stream="err")
    two = machines.outpost(0, None, "--devices", "cpu:1,cpu:2")
    ends_well(machines, [one, two], expected)
    assert "worker w1 of 3 on cpu:1, " in two.err
    assert "worker w2 of 3 on cpu:2, " in two.err


@pytest.mark.parametrize("part", ["dense", "ahead", "rows", "points"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_dies_is_replaced_and_the_other_one_goes_on(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str, number: int
) -> None:
    flag, named = tmp_path / "flag", tmp_path / "named"
    os.mkfifo(named)
    machines = Machines(stack, keys, program, part, str(STEPS), "crash", flag, "6", str(number), named)
    outpost = both(machines)
    before = workers_of(outpost)
    victim, other = before[f"w{number}"], before[f"w{1 - number}"]
    named.write_text(str(victim.pid))  # when its replica has come to that step
    outpost.wait_for(rf"(?s)worker w{number} of 2 .* worker w{number} of 2 ", stream="err")
    assert not victim.is_running()
    ends_well(machines, [outpost], {part: alone[part]})
    assert outpost.err.count(f"worker w{1 - number} of 2 on ") == 1, other
    assert f"worker w{1 - number} (pid" not in machines.head.err


@pytest.mark.parametrize("part", ["dense", "points"])
def test_an_outpost_that_dies_takes_its_workers_and_another_one_brings_new_ones(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str
) -> None:
    machines = Machines(stack, keys, program, part, str(STEPS), "crash", tmp_path / "flag", "6", "1", "outpost")
    outpost = both(machines)
    assert outpost.wait(unit(60)).code == -signal.SIGKILL
    assert outpost.left(unit(5)) == []
    ends_well(machines, [both(machines)], {part: alone[part]})
    assert len(re.findall(r"worker w\d \(pid \d+ on 127.0.0.1\) ended by the end of its conn", machines.head.err)) >= 2


@pytest.mark.parametrize("part", ["dense", "points"])
@pytest.mark.parametrize("module", ["cs_server", "central_storage.gateway"])
def test_a_death_of_the_service_changes_no_bit(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str, module: str
) -> None:
    named = tmp_path / "named"
    os.mkfifo(named)
    machines = Machines(stack, keys, program, part, str(STEPS), "crash", tmp_path / "flag", "6", "1", named)
    outpost = both(machines)
    victim = process_of(machines, module)
    named.write_text(str(victim.pid))
    ends_well(machines, [outpost], {part: alone[part]})
    assert not victim.is_running()
    anew = 2 if module == "central_storage.gateway" else 1
    assert [outpost.err.count(f"worker w{number} of 2 on ") for number in range(2)] == [anew, anew]
    assert ("other workers are asked for" in outpost.err) == (anew == 2)


@pytest.mark.parametrize("part", ["ahead", "points"])
def test_a_link_that_is_cut_and_mended_changes_no_bit(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path, part: str
) -> None:
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, part, str(STEPS), *door.words)
    cut_and_mended(machines, door, part, alone[part], lambda address: [both(machines, address)])


def test_an_outpost_that_is_cut_off_for_too_long_is_replaced(
    stack: ExitStack, keys: Path, program: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    """Its workers are late then, and nobody hears them."""
    door = Door(tmp_path / "door", 6)
    machines = Machines(stack, keys, program, "dense", str(STEPS), *door.words, options=("--return-timeout", "2"))
    with proxied(machines.address) as (address, cut, hold):
        outpost = both(machines, address)
        machines.head.wait_for("at the door")
        hold(True)
        cut()
        door.open()
        for number in range(2):
            machines.head.wait_for(rf"worker w{number} \(pid \d+ on 127.0.0.1\) ended by the end of", stream="err")
        gone = outpost.wait(unit(20))
        assert gone.code == 4, str(gone)
        hold(False)
        ends_well(machines, [both(machines)], {"dense": alone["dense"]})


def test_ctrl_c_at_an_outpost_ends_all_its_workers(stack: ExitStack, keys: Path, program: Path, tmp_path: Path) -> None:
    door = Door(tmp_path / "door", 3)
    machines = Machines(stack, keys, program, "dense", "6", *door.words)
    outpost = both(machines)
    machines.head.wait_for("at the door")
    outpost.press_ctrl_c()
    assert outpost.wait().code == 0
    assert outpost.left(unit(5)) == []
    assert len(machines.left()) == 1  # that of the service
    there = Path(machines.places[1]) / "own"  # a directory that the user names, which is not there yet
    again = both(machines, None, "--run-dir", str(there))
    assert sorted(os.listdir(there)) == ["0", "1"]
    door.open()
    machines.head.wait(unit(60)).ok()
    again.wait().ok()
    assert machines.left() == []


def test_more_workers_than_the_key_or_the_service_has_places_for(
    stack: ExitStack, keys: Path, program: Path, tmp_path: Path
) -> None:
    door = Door(tmp_path / "door", 0)
    machines = Machines(stack, keys, program, "dense", "1", *door.words, workers=1)
    refused = machines.outpost(1, None, *TWO).wait()
    said = "the key of worker-b is for 1 worker, and its machine has 2 to run: name fewer devices"
    assert (refused.code, said in refused.err) == (2, True), str(refused)
    many = machines.outpost(0, None, *TWO).wait()
    assert (many.code, "2 workers to run, and the service only 1 of 1 left" in many.err) == (3, True), str(many)
    for outpost in (refused, many):
        assert "Traceback" not in outpost.err
    machines.outpost(1).wait_for("worker w0 of 1 on cpu:0, ", stream="err")
    machines.head.wait_for("at the door", timeout=unit(60))
    door.open()
    machines.head.wait().ok()
