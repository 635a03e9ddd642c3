"""P13: a disk that is full or broken. The error names path, need and have; the last checkpoint stays whole; no draft is
left; and the manager goes on, raises or stops, as it was told."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.mounts import UNSHARE, need_mount_namespaces
from tests.harness.processes import run, start

from central_storage.checkpoint import disk
from central_storage.checkpoint.failures import SAVE_FAILED
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, CheckpointManager, CheckpointOptions
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointSaveError, InvalidArgumentError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets

OPERATIONS = ("open", "pwrite", "fsync", "link", "replace", "unlink", "mkdir", "fchmod", "fstat", "listdir", "close")


class Failing:
    """Stands in the place of the module ``os`` in the file layer: its ``nth`` operation fails."""

    def __init__(self, number: int, nth: int) -> None:
        self._number = number
        self._left = nth
        self.failed = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in OPERATIONS:
            return found

        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.failed = name
                if name == "close":  # Linux closes the file, and then says that it failed
                    found(*arguments)
                raise OSError(self._number, os.strerror(self._number))
            return found(*arguments)

        return call


def drafts(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.endswith(".draft")]


@pytest.mark.parametrize("in_thread", [False, True], ids=["at once", "in a thread"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_operation_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, in_thread: bool
) -> None:
    """Of the third save of a manager that keeps one, and of the first in a new directory."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(logging.getLogger("central_storage.train"), "disabled", True)
    options = CheckpointOptions(enable_async=in_thread)
    failed = []
    whole = os.stat(Checkpoint(w=Variable(np.arange(5.0))).save(tmp_path / "ckpt")).st_size
    for is_first in (False, True):
        for nth in range(1, 60):
            directory = tmp_path / f"{is_first}-{nth}" / "new"
            w = Variable(np.arange(5.0))
            manager = CheckpointManager(Checkpoint(w=w), directory, max_to_keep=1, if_save_fails="continue")
            if not is_first:
                assert manager.save()
                w.assign(np.arange(5.0) + 1)
            failing = Failing(number, nth)
            with monkeypatch.context() as patch:
                patch.setattr(disk, "os", failing)
                path = manager.save(options=options)
                manager.sync()
                path = None if manager.failed_saves else path
            if not failing.failed:
                break
            failed.append(failing.failed)
            error = manager.last_save_error
            assert (path is None) == (manager.failed_saves == 1) == (error is not None)
            if error is not None:
                assert (error.errno, error.filename.startswith(str(directory))) == (number, True)
                if "read back" in str(error):
                    assert error.needed_nbytes is None
                else:
                    is_first_look = failing.failed == "listdir" and nth <= 1 + in_thread
                    assert error.needed_nbytes == (40 if is_first_look else whole)
                    assert str(error.needed_nbytes) in str(error)
                    assert "are free" in str(error)
            fresh = Checkpoint(w=Variable(np.zeros(5)))
            found = CheckpointManager(fresh, directory, max_to_keep=1).restore_or_initialize()
            assert found is not None or (is_first and path is None), (nth, failing.failed)
            if found is not None:  # a save that is refused at its very end has left a whole file
                values = [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
                assert fresh.w.numpy().tolist() in (values[:1] if is_first else values[path is not None :])
            if failing.failed != "unlink":
                assert drafts(directory.parent) == [], (nth, failing.failed)
            w.assign(np.arange(5.0) + 2)
            assert manager.save()  # the disk works again
            assert drafts(directory) == []
            assert len(manager.checkpoints) == 1
    assert set(failed) >= set(OPERATIONS) - {"replace"}
    assert len(failed) >= 25


def test_the_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "central_storage")
    checkpoint = Checkpoint(w=Variable(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", Failing(errno.ENOSPC, 8))
        with pytest.raises(CheckpointSaveError, match="No space left on device; the checkpoint needs") as caught:
            CheckpointManager(checkpoint, tmp_path, 1).save()
    error = caught.value
    again = copy.copy(error)  # as pickle does
    assert (again.errno, again.filename, again.needed_nbytes) == (errno.ENOSPC, error.filename, error.needed_nbytes)
    going_on = CheckpointManager(checkpoint, tmp_path, 1, if_save_fails="continue")
    for count in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "os", Failing(errno.ENOSPC, 8))
            assert going_on.save() is None
        assert going_on.failed_saves == count
        assert f"a checkpoint was not saved ({count} by now), and the training goes on" in caplog.text
    path = going_on.save()
    assert path is not None
    assert error.needed_nbytes == os.stat(path).st_size
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", Failing(errno.ENOSPC, 8))
        with pytest.raises(SystemExit) as stopped:
            CheckpointManager(checkpoint, tmp_path, 1, if_save_fails="stop").save()
    assert stopped.value.code == SAVE_FAILED == 6
    assert "a checkpoint was not saved, and the training stops: [Errno 28] No space left" in caplog.text
    with pytest.raises(InvalidArgumentError, match="must be one of raise, continue, stop, not 'ignore'"):
        CheckpointManager(checkpoint, tmp_path, 1, if_save_fails="ignore")  # type: ignore[arg-type]


STOPS = """
import sys
import numpy as np
import central_storage as cs
from central_storage import train
from central_storage.checkpoint import disk

def full(file, data, offset, advance=None):
    raise OSError(28, "No space left on device")

disk.write_at = full
manager = cs.train.CheckpointManager(cs.train.Checkpoint(w=cs.Variable(1.0)), sys.argv[1], 1, if_save_fails="stop")
try:
    manager.save()
except Exception:
    print("caught")
finally:
    print("ended")
"""


def test_the_exit_code_of_a_script_that_stops(tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    ended = run(script, tmp_path / "checkpoints")
    assert (ended.code, ended.out) == (SAVE_FAILED, "ended\n")
    assert "the checkpoint needs" in ended.err


FILLS = """
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import central_storage as cs

place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
found = {"saved": 0, "refused": 0, "wrong": []}
w = cs.Variable(np.zeros(100_000))  # 800 kB
for level in range(100):
    directory = place / str(level)
    manager = cs.train.CheckpointManager(cs.train.Checkpoint(w=w), directory, 1, if_save_fails="continue")
    w.assign(np.full(100_000, 1.0))
    manager.save()
    filler = place / "filler"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    filler.write_bytes(bytes(free - level * 16_384))
    room = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    w.assign(np.full(100_000, 2.0))
    path = manager.save()
    error = manager.last_save_error
    w.assign(np.full(100_000, 3.0))
    restored = manager.restore_or_initialize()
    names = os.listdir(directory)
    value = 1.0 if path is None else 2.0
    is_good = set(w.numpy()) == {value} and len(names) == 1 and names[0].endswith(".safetensors")
    if path is None:
        is_good &= error.errno == 28 and error.free_nbytes == room < error.needed_nbytes
        is_good &= error.filename.startswith(str(place))
        is_good &= str(error.free_nbytes) in str(error) and str(error.needed_nbytes) in str(error)
        is_good &= restored.endswith("ckpt-1.safetensors")
    found["saved" if path else "refused"] += 1
    if not is_good:
        found["wrong"].append([level, names, str(error)])
    filler.unlink()
    for name in names:
        (directory / name).unlink()
print(json.dumps(found))
"""


@pytest.mark.long
def test_100_fill_levels_of_a_small_disk(tmp_path: Path) -> None:
    """A tmpfs of 4 MiB in a mount namespace of its own, so nothing else sees it."""
    need_mount_namespaces("P13 is not tested with a full disk")
    script, place = tmp_path / "fills.py", tmp_path / "small"
    script.write_text(FILLS)
    place.mkdir()
    with start(*UNSHARE, sys.executable, script, place) as child:
        found = json.loads(child.wait().ok().out)
    print(f"\n{found['saved']} saved, {found['refused']} refused, {len(found['wrong'])} wrong")
    assert found["wrong"] == []
    assert found["saved"] + found["refused"] == 100
    assert min(found["saved"], found["refused"]) >= 25
