"""P11: wherever the power is cut while checkpoints are saved, the previous or the new one loads. Every cut is tried:
after each operation, with every combination of lost writes and names (``power.py``)."""

from __future__ import annotations

import ast
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import central_storage.train
from central_storage.checkpoint import disk, graph, stored, writing
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, CheckpointManager, CheckpointOptions
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointError

from .power import Disk, State, made

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets

Save = Callable[[Checkpoint, Path], object]

EMPTY = "the only checkpoint is an empty file"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the thousands of warnings of damaged files that are skipped."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Saves:
    """One series of saves on a disk whose power may be cut at any moment, and what was found."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool = True) -> None:
        self.has_links = has_links
        self.cuts = 0
        self.bad = ""
        self._root, self._copy = tmp_path / "disk", tmp_path / "copy"
        self._root.mkdir()
        self._copy.mkdir()
        self._patch = monkeypatch
        self._states: dict[State, str] = {}

    def run(self, save: Save, count: int) -> None:
        """Save ``count`` times, each time with other values, until something bad is found."""
        w, u = Variable(np.zeros(3)), Variable(np.float32(0))
        checkpoint = Checkpoint(w=w, u=u)
        for number in range(1, count + 1):
            w.assign(np.full(3, float(number)))
            u.assign(np.float32(number))
            self._states = {}
            with self._patch.context() as patch:
                patch.setattr(disk, "SMALL", 8)  # so that the values take several writes
                patch.setattr(disk, "os", Disk(self._root, self._note) if number == 1 else self._disk)
                self._disk = disk.os
                save(checkpoint, self._root / "new" / "directory")
                last = self._now
            # Before the end of the first save there need not be one; at the end only the new one may be there.
            for state, operation in self._states.items():
                self.cuts += 1
                found = self._loaded(state)
                legal: set[object] = {number} if state in last else {number - 1 or None, number}
                if number == 1 and not self.has_links:  # an empty file may be left alone, which is not taken for none
                    legal.add(EMPTY)
                if found not in legal:
                    names = sorted(name for name, _ in state)
                    self.bad = f"save {number}, after {operation}: {found} of {names}"
                    return

    def _note(self, operation: str, states: set[State]) -> None:
        self._now = states
        for state in states:
            self._states.setdefault(state, operation)

    def _loaded(self, state: State) -> object:
        """The number of the save whose values are restored; None if there is no checkpoint."""
        made(state, self._copy)
        directory = self._copy / "new" / "directory"
        w, u = Variable(np.full(3, -1.0)), Variable(np.float32(-1))
        manager = CheckpointManager(Checkpoint(w=w, u=u), directory, max_to_keep=1)
        with self._patch.context() as patch:
            patch.setattr(os, "fsync", lambda _: None)
            try:
                path = manager.restore_or_initialize()
            except CheckpointError as error:
                return EMPTY if re.search("every .* it ends at byte 0", str(error)) else str(error)
            values = {*w.numpy().tolist(), float(u)}
            manager.save()  # it works, and leaves nothing of the dead process behind
        if len(values) != 1 or manager.checkpoints != sorted(map(str, directory.iterdir())):
            return f"{values} and {sorted(directory.iterdir())}"
        return None if path is None else int(values.pop())


def by_manager(checkpoint: Checkpoint, directory: Path) -> None:
    CheckpointManager(checkpoint, directory, max_to_keep=1).save()


def by_manager_that_keeps_two(checkpoint: Checkpoint, directory: Path) -> None:
    CheckpointManager(checkpoint, directory, max_to_keep=2).save()


def by_manager_in_a_thread(checkpoint: Checkpoint, directory: Path) -> None:
    manager = CheckpointManager(checkpoint, directory, max_to_keep=1)
    manager.save(options=CheckpointOptions(enable_async=True))
    manager.sync()


def under_one_number(checkpoint: Checkpoint, directory: Path) -> None:
    CheckpointManager(checkpoint, directory, max_to_keep=1).save(checkpoint_number=7)


def without_manager(checkpoint: Checkpoint, directory: Path) -> None:
    checkpoint.save(directory / "ckpt")
    for older in sorted(directory.glob("ckpt-*.safetensors"))[:-1]:
        disk.remove(str(older))


def refuse_links(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    ("save", "has_links"),
    [
        (by_manager, True),
        (by_manager, False),
        (by_manager_in_a_thread, True),
        (under_one_number, True),
        pytest.param(by_manager_that_keeps_two, True, marks=pytest.mark.slow),
        pytest.param(by_manager_that_keeps_two, False, marks=pytest.mark.slow),
        pytest.param(under_one_number, False, marks=pytest.mark.slow),
        pytest.param(without_manager, True, marks=pytest.mark.slow),
    ],
)
def test_every_cut_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(Disk, "link", refuse_links)
    saves = Saves(tmp_path, monkeypatch, has_links)
    saves.run(save, 3)
    print(f"\n{save.__name__}: {saves.cuts} states after a cut")
    assert not saves.bad
    assert saves.cuts >= 90


# --- broken on purpose --------------------------------------------------------------------------------------------


def no_sync_of_the_file(monkeypatch: pytest.MonkeyPatch) -> Save:
    monkeypatch.setattr(disk, "sync", lambda file: None)
    return by_manager


def no_sync_of_the_directory(monkeypatch: pytest.MonkeyPatch) -> Save:
    monkeypatch.setattr(disk, "sync_directory", lambda directory: None)
    return by_manager


def no_sync_of_new_directories(monkeypatch: pytest.MonkeyPatch) -> Save:
    sync = disk.sync_directory
    monkeypatch.setattr(disk, "sync_directory", lambda path: sync(path) if path.endswith("directory") else None)
    return by_manager


def delete_before_the_new_one_is_there(monkeypatch: pytest.MonkeyPatch) -> Save:
    def save(checkpoint: Checkpoint, directory: Path) -> None:
        for path in directory.glob("*.safetensors"):
            disk.remove(str(path))
        by_manager(checkpoint, directory)

    return save


def delete_before_the_directory_is_synced(monkeypatch: pytest.MonkeyPatch) -> Save:
    sync = disk.sync_directory

    def delete_first(path: str) -> None:
        for older in sorted(Path(path).glob("*.safetensors"))[:-1]:
            disk.remove(str(older))
        sync(path)

    monkeypatch.setattr(disk, "sync_directory", delete_first)
    return by_manager


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> Save:
    open_draft = writing.open_draft

    def open_in_place(path: str) -> tuple[str, int, int]:
        if not os.path.exists(path):
            return open_draft(path)
        file = disk.os.open(path, os.O_RDWR)
        return path, file, disk.mode_of(file)

    class InPlace(writing._Draft):
        def close(self) -> None:
            if self.name.endswith(".draft"):
                super().close()
            else:
                disk.close(self._file)

    monkeypatch.setattr(writing, "open_draft", open_in_place)
    monkeypatch.setattr(writing, "_Draft", InPlace)
    return under_one_number


SABOTAGES = [
    no_sync_of_the_file,
    no_sync_of_the_directory,
    no_sync_of_new_directories,
    delete_before_the_new_one_is_there,
    delete_before_the_directory_is_synced,
    write_in_place,
]


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_broken_save_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], Save]
) -> None:
    saves = Saves(tmp_path, monkeypatch)
    saves.run(sabotage(monkeypatch), 2)
    print(f"\n{sabotage.__name__}: the state number {saves.cuts} after a cut is bad: {saves.bad}")
    assert saves.bad


# --- one layer ----------------------------------------------------------------------------------------------------

CHANGES = {"open", "write", "pwrite", "unlink", "remove", "rename", "replace", "link", "symlink", "mkdir", "makedirs"}
CHANGES |= {"fsync", "fdatasync", "truncate", "ftruncate", "chmod", "fchmod", "rmdir", "rmtree", "write_text"}
CHANGES |= {"write_bytes", "touch", "scandir", "listdir", "pread", "preadv", "read_bytes", "mkstemp"}


def calls_of_the_system(source: str) -> list[str]:
    """Calls by which a module would pass by the file layer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            of = node.func
            if isinstance(of, ast.Name) and of.id == "open":
                found.append(f"line {node.lineno}: open")
            if isinstance(of, ast.Attribute) and of.attr in CHANGES:
                owner = ast.unparse(of.value)
                if owner in ("os", "shutil", "tempfile") or owner.startswith(("Path(", "pathlib.")):
                    found.append(f"line {node.lineno}: {owner}.{of.attr}")
    return found


def test_checkpoints_use_files_only_through_the_layer() -> None:
    package = Path(disk.__file__).parent
    modules = {Path(central_storage.train.__file__), *package.glob("*.py")} - {Path(disk.__file__)}
    assert {Path(module.__file__) for module in (graph, stored, writing) if module.__file__} <= modules
    assert {path.name: calls_of_the_system(path.read_text()) for path in modules} == {path.name: [] for path in modules}
    assert len(calls_of_the_system(Path(disk.__file__).read_text())) >= 10
