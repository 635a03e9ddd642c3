"""A disk whose power is cut: it records the operations of real saves, and makes every state that a cut may leave.

What is not synced may be lost, in any combination: each write of a file (as a whole, or its second half), and each
change of a name in a directory. ``fsync`` of a file keeps its content but not its name; ``fsync`` of a directory keeps
the names in it. A file whose write is lost has zeros there if a later write of it is kept.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class _Inode:
    """A file or a directory: what is on the disk, and what may be."""

    is_directory: bool
    content: bytes = b""
    #: (offset, bytes) of each write since the last sync.
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    entries: dict[str, _Inode] = field(default_factory=dict)
    #: For each name that has changed since the last sync: every inode that it had since then; None where it had none.
    changes: dict[str, list[_Inode | None]] = field(default_factory=dict)

    def contents(self) -> set[bytes | None]:
        """Every content of the file that a cut may leave; None for a directory."""
        if self.is_directory:
            return {None}
        return {self.with_writes(kept) for kept in itertools.product((0, 1, 2), repeat=len(self.writes))}

    def with_writes(self, halves: Sequence[int]) -> bytes:
        """The content with that many halves of each write since the last sync."""
        content = bytearray(self.content)
        for (offset, data), count in zip(self.writes, halves, strict=True):
            if written := data[: len(data) * count // 2]:
                content.extend(bytes(max(0, offset + len(written) - len(content))))
                content[offset : offset + len(written)] = written
        return bytes(content)

    def now(self) -> dict[str, _Inode]:
        """The names of the directory as processes see them."""
        found = dict(self.entries)
        for name, seen in self.changes.items():
            found.pop(name, None)
            if (last := seen[-1]) is not None:
                found[name] = last
        return found

    def change(self, name: str, inode: _Inode | None) -> None:
        self.changes.setdefault(name, [self.entries.get(name)]).append(inode)


#: Path -> content of each file; a directory has None.
State = frozenset[tuple[str, bytes | None]]


def _names(directory: _Inode, path: str = "") -> list[dict[str, _Inode]]:
    """Every choice of names below a directory that a cut may leave."""
    choices: list[list[dict[str, _Inode]]] = []
    for name in sorted(directory.entries.keys() | directory.changes.keys()):
        at = f"{path}/{name}".lstrip("/")
        possible = []
        for inode in dict.fromkeys(directory.changes.get(name, [directory.entries.get(name)])):
            if inode is None:
                possible.append({})
            elif inode.is_directory:
                possible += [{at: inode, **below} for below in _names(inode, at)]
            else:
                possible.append({at: inode})
        choices.append(possible)
    return [{at: inode for part in chosen for at, inode in part.items()} for chosen in itertools.product(*choices)]


def _states(top: _Inode) -> set[State]:
    """Every state of a disk that a cut may leave. A file with two names has one content."""
    found = set()
    for names in _names(top):
        inodes = list(dict.fromkeys(names.values()))
        for contents in itertools.product(*(inode.contents() for inode in inodes)):
            chosen = dict(zip(inodes, contents, strict=True))
            found.add(frozenset((at, chosen[inode]) for at, inode in names.items()))
    return found


class Disk:
    """Stands in the place of the module ``os`` in the file layer, for everything below ``root``. It does what ``os``
    does, and calls ``after`` with the states that a cut may leave after each operation that changes something."""

    def __init__(self, root: Path, after: Callable[[str, set[State]], object]) -> None:
        self._root = root
        self._after = after
        self._top = _Inode(is_directory=True)
        self._open: dict[int, _Inode] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("ftruncate", "truncate", "write", "rename", "symlink", "rmdir", "makedirs", "pwritev", "writev"):
            raise AssertionError(f"the simulated disk does not know os.{name}")
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        is_new = not os.path.lexists(path)
        assert is_new or not flags & os.O_TRUNC, "the simulated disk does not empty files"
        file = os.open(path, flags, mode)
        directory, name = self._place(path)
        if is_new:
            directory.change(name, _Inode(is_directory=False))
        self._open[file] = self._find(path)
        if is_new:
            self._cut(f"open {name}")
        return file

    def close(self, file: int) -> None:
        self._open.pop(file, None)
        os.close(file)

    def pwrite(self, file: int, data: memoryview, offset: int) -> int:
        count = os.pwrite(file, data, offset)
        self._open[file].writes.append((offset, bytes(data[:count])))
        self._cut("pwrite")
        return count

    def fsync(self, file: int) -> None:
        os.fsync(file)
        inode = self._open[file]
        if inode.is_directory:
            inode.entries, inode.changes = inode.now(), {}
        else:
            inode.content, inode.writes = inode.with_writes([2] * len(inode.writes)), []
        self._cut("fsync")

    def link(self, path: str, name: str) -> None:
        os.link(path, name)
        inode = self._find(path)
        directory, last = self._place(name)
        directory.change(last, inode)
        self._cut(f"link {last}")

    def replace(self, path: str, name: str) -> None:
        os.replace(path, name)
        if path == name:
            return
        (source, old), (target, new) = self._place(path), self._place(name)
        inode = source.now()[old]
        target.change(new, inode)
        source.change(old, None)
        self._cut(f"replace {new}")

    def unlink(self, path: str) -> None:
        os.unlink(path)
        directory, name = self._place(path)
        directory.change(name, None)
        self._cut(f"unlink {name}")

    def mkdir(self, path: str) -> None:
        os.mkdir(path)
        directory, name = self._place(path)
        directory.change(name, _Inode(is_directory=True))
        self._cut(f"mkdir {name}")

    def _cut(self, operation: str) -> None:
        self._after(operation, _states(self._top))

    def _find(self, path: str) -> _Inode:
        found = self._top
        for part in Path(path).relative_to(self._root).parts:
            found = found.now()[part]
        return found

    def _place(self, path: str) -> tuple[_Inode, str]:
        if Path(path) == self._root:
            return self._top, ""
        return self._find(str(Path(path).parent)), Path(path).name


def made(state: State, root: Path) -> None:
    """Make the files of a state below ``root``, and remove all others there."""
    named = {root / name: content for name, content in state}
    for path in sorted(root.rglob("*"), reverse=True):
        if path not in named:
            path.rmdir() if path.is_dir() else path.unlink()
    for path, content in sorted(named.items()):
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
