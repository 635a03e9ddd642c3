"""P10: a process that is killed while it saves leaves the previous or the new checkpoint, never none and never a mix.

It saves itself, or in a thread while it goes on with other values.

The script imports once, and each trial is a process of its own that it forks. The places are the failpoints ``save.*``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.harness.processes import run
from tests.harness.timing import unit

from cs_runtime.failpoints import FAILPOINTS

KILLS = """
import json
import logging
import os
import signal
import sys
from pathlib import Path

import numpy as np

import central_storage as cs
from central_storage import train
from central_storage.checkpoint import background, disk, entries, manager as managers, writing
from central_storage.checkpoint import graph
from cs_runtime.failpoints import failpoints_of

logging.disable(logging.WARNING)
SABOTAGE, HOW = sys.argv[2], sys.argv[4]
COUNT = int(sys.argv[5])
OPTIONS = train.CheckpointOptions(enable_async=HOW == "in a thread")
disk.PART = 4096  # an array of 16 kB has four parts


def variables():
    return cs.Variable(np.zeros(2000)), cs.Variable(np.zeros(2000))


def manager_of(directory, a, b):
    return train.CheckpointManager(train.Checkpoint(a=a, b=b), directory, max_to_keep=2)


def trial(directory, place, nth, number):
    pipe, end = os.pipe()
    child = os.fork()
    if not child:
        for module in (background, disk, managers, writing):
            module.failpoint = failpoints_of(f"{place}=kill@{nth}")
        if SABOTAGE == "no copy":
            read = entries.read_together
            entries.read_together = graph.read_together = lambda entries, *, copied: read(entries, copied=False)
        if SABOTAGE == "in place":
            os.makedirs(directory)
            writing.open_draft = lambda path: (path, os.open(path, os.O_RDWR | os.O_CREAT), 0o644)
        a, b = variables()
        manager = manager_of(directory, a, b)
        for k in range(1, COUNT + 1):
            a.assign(np.full(2000, float(k)))
            b.assign(np.full(2000, float(k)))
            manager.save(checkpoint_number=number, options=OPTIONS)
            if HOW == "in a thread":
                a.assign(np.full(2000, k + 0.5))
                b.assign(np.full(2000, k + 0.5))
                manager.sync()
            os.write(end, bytes([k]))
        os._exit(0)
    os.close(end)
    said = max(os.read(pipe, 100), default=0)
    while more := os.read(pipe, 100):
        said = max(more)
    os.close(pipe)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        return None
    a, b = variables()
    manager = manager_of(directory, a, b)
    try:
        manager.restore_or_initialize()
    except cs.errors.CheckpointError as error:
        return str(error)
    values = {*a.numpy().tolist(), *b.numpy().tolist()}
    if len(values) != 1 or min(values) not in (said, said + 1):
        return f"{values} after {said}"
    manager.save()
    names = sorted(map(str, Path(directory).iterdir()))
    if names != sorted(manager.checkpoints):
        return f"left behind: {names}"
    return ""


root, found = Path(sys.argv[1]), {}
for place, hits, number in json.loads(sys.argv[3]):
    for nth in hits:
        key = f"{place}@{nth}" if number is None else f"{place}@{nth} of {number}"
        found[key] = trial(root / f"{place}-{nth}-{number}", place, nth, number)
print(json.dumps(found))
"""

Point = tuple[str, list[int], int | None]
#: place, hits, the number of the checkpoint that is replaced, if one is.
KILL_POINTS: list[Point] = [
    ("save.draft", [1, 2, 3, 5], None),
    ("save.write", [1, 2, 4, 5, 8, 9, 12, 14, 18, 27, 40, 54], None),
    ("save.sync", [1, 2, 3, 4, 6], None),
    ("save.take", [1, 2, 3, 4, 6], None),
    ("save.taken", [1, 2, 3, 4, 6], None),
    ("save.saved", [1, 2, 3, 4, 6], None),
    ("save.checked", [1, 2, 3, 6], None),
    ("save.delete", [1, 2, 3], None),
    ("save.replace", [1, 2, 3, 4, 6], 7),
]
#: That only a save in a thread passes.
IN_A_THREAD: list[Point] = [("save.copied", [1, 2, 3, 6], None)]
#: Nine saves come to a place so often, and to the others nine times. Each hit is tried, and at the places of a save
#: that replaces a checkpoint, hits of such saves, too.
OF_NINE_SAVES = {"save.write": 81, "save.delete": 7}
OF_BOTH = {"save.draft", "save.write", "save.sync", "save.checked"}
EVERY_HIT: list[Point] = [
    (place, list(range(1, OF_NINE_SAVES.get(place, 9) + 1)), number)
    for place, _, first in KILL_POINTS
    for number in ([None, 7] if place in OF_BOTH else [first])
]
#: How long all trials of one way may take, seconds.
_PATIENCE = 500.0


def trials(
    tmp_path: Path, how: str, sabotage: str = "none", points: list[Point] = KILL_POINTS, saves: int = 6
) -> dict[str, str | None]:
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    said = json.dumps(points + IN_A_THREAD * (how == "in a thread"))
    ended = run(script, tmp_path, sabotage, said, how, str(saves), timeout=unit(_PATIENCE))
    found: dict[str, str | None] = json.loads(ended.ok().out)
    return found


def judge(found: dict[str, str | None]) -> None:
    """Every kill happened, and left what it should."""
    print(f"\n{len(found)} kills, {sum(bool(why) for why in found.values())} bad")
    assert {place: why for place, why in found.items() if why != ""} == {}


@pytest.mark.long
@pytest.mark.parametrize(("how", "count"), [("at once", 48), ("in a thread", 52)])
def test_kills_at_every_place_of_a_save(tmp_path: Path, how: str, count: int) -> None:
    points = {place for place, _, _ in KILL_POINTS + IN_A_THREAD}
    assert points == {name for name in FAILPOINTS if name.startswith("save.")}
    found = trials(tmp_path, how)
    assert len(found) == count
    judge(found)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "count"), [("at once", 259), ("in a thread", 263)])
def test_kills_at_every_hit_of_every_place(tmp_path: Path, how: str, count: int) -> None:
    found = trials(tmp_path, how, points=EVERY_HIT, saves=9)
    assert len(found) == count
    judge(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "sabotage"), [("at once", "in place"), ("in a thread", "in place"), ("in a thread", "no copy")]
)
def test_kills_find_a_broken_save(tmp_path: Path, how: str, sabotage: str) -> None:
    assert any(trials(tmp_path, how, sabotage).values())
