"""P10: a process that is killed while it saves leaves the previous or the new checkpoint, never none and never a mix.

The script imports once, and each trial is a process of its own that it forks. The places are the failpoints ``save.*``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.harness.processes import run

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
from central_storage.checkpoint import disk, writing
from cs_runtime.failpoints import failpoints_of

logging.disable(logging.WARNING)
SABOTAGE = sys.argv[2]
COUNT = 6
disk.PART = 4096  # an array of 16 kB has four parts


def variables():
    return cs.Variable(np.zeros(2000)), cs.Variable(np.zeros(2000))


def manager_of(directory, a, b):
    return train.CheckpointManager(train.Checkpoint(a=a, b=b), directory, max_to_keep=2)


def trial(directory, place, nth, number):
    pipe, end = os.pipe()
    child = os.fork()
    if not child:
        disk.failpoint = writing.failpoint = train.failpoint = failpoints_of(f"{place}=kill@{nth}")
        if SABOTAGE == "in place":
            os.makedirs(directory)
            writing.open_draft = lambda path: (path, os.open(path, os.O_RDWR | os.O_CREAT), 0o644)
        a, b = variables()
        manager = manager_of(directory, a, b)
        for k in range(1, COUNT + 1):
            a.assign(np.full(2000, float(k)))
            b.assign(np.full(2000, float(k)))
            manager.save(checkpoint_number=number)
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
    if len(values) != 1 or not said <= min(values) <= said + 1:
        return f"{values} after {said}"
    manager.save()
    names = sorted(map(str, Path(directory).iterdir()))
    if names != sorted(manager.checkpoints):
        return f"left behind: {names}"
    return ""


root, found = Path(sys.argv[1]), {}
for place, hits, number in json.loads(sys.argv[3]):
    for nth in hits:
        found[f"{place}@{nth}"] = trial(root / f"{place}-{nth}-{number}", place, nth, number)
print(json.dumps(found))
"""

#: place, hits, the number of the checkpoint that is replaced, if one is.
KILL_POINTS = [
    ("save.draft", [1, 2, 3, 5], None),
    ("save.write", [1, 2, 4, 5, 8, 9, 12, 14, 18, 27, 40, 54], None),
    ("save.sync", [1, 2, 3, 4, 6], None),
    ("save.take", [1, 2, 3, 4, 6], None),
    ("save.taken", [1, 2, 3, 4, 6], None),
    ("save.saved", [1, 2, 3, 4, 6], None),
    ("save.delete", [1, 2, 3], None),
    ("save.replace", [1, 2, 3, 4, 6], 7),
]


def trials(tmp_path: Path, sabotage: str = "none") -> dict[str, str | None]:
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    found: dict[str, str | None] = json.loads(run(script, tmp_path, sabotage, json.dumps(KILL_POINTS)).ok().out)
    return found


@pytest.mark.long
def test_44_kills_at_every_place_of_a_save(tmp_path: Path) -> None:
    assert {place for place, _, _ in KILL_POINTS} == {name for name in FAILPOINTS if name.startswith("save.")}
    found = trials(tmp_path)
    assert len(found) == 44
    print(f"\n{len(found)} kills, {sum(bool(why) for why in found.values())} bad")
    assert {place: why for place, why in found.items() if why != ""} == {}


@pytest.mark.long
def test_kills_find_a_save_in_place(tmp_path: Path) -> None:
    assert any(trials(tmp_path, "in place").values())
