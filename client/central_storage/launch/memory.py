"""The memory of a run: the supervisor makes every segment, keeps it, and decides who may write it.

The content of a segment lives as long as the supervisor, whichever other process is killed. A segment is a memfd of its
full reservation, of which only touched pages take memory; the server may have it extended. A reader gets a descriptor
opened read-only. This guards against mistakes only: a process of the same user may change the segment's mode and open
it again. :class:`Memfd` is the usual medium. :class:`Files` keeps the segments in files, which another supervisor finds
after this one was killed. :class:`Unshared` gives the memory to the server only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from typing import Protocol

from cs_proto import segment_names, step_times
from cs_proto.errors import ContextError, InvalidArgumentError, MemoryPlanError
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import ExtendSegment, MakeSegment, Segment

__all__ = ["Files", "Medium", "Memfd", "Memory", "Unshared"]

_log = logging.getLogger("central_storage.launch")

# Stands for the writer in the name of a file, if only the server writes it.
_NOBODY = "server"
# The arena of a replica, in which the controller holds results.
_ARENA = re.compile(r"arena/[0-9]+")
_WRITER = re.compile(r"|controller|w(0|[1-9][0-9]{0,4})")


class Medium(Protocol):
    """The memory in which segments lie."""

    #: The name of the transport of bulk data, which is printed.
    title: str
    #: Whether workers and clients map segments, too; otherwise the server alone does, and their bytes travel in frames.
    is_shared: bool

    def make(self, name: str, nbytes: int, writer: str) -> int:
        """A descriptor, open for reading and writing, of new zeroed memory of ``nbytes``. Raises OSError."""

    def found(self) -> list[tuple[str, int, str, int]]:
        """Name, bytes, writer and descriptor of each segment that a supervisor before this one has left."""

    def open_reader(self, descriptor: int) -> int:
        """Another descriptor of the same memory that cannot be mapped for writing. Raises OSError."""


class Memfd:
    """Anonymous memory of the kernel: it has no name in any file system and no limit but memory itself. It is sealed,
    so that no process can make it shorter and take pages away from another process's mapping."""

    title = "shared memory (memfd)"
    is_shared = True

    def __init__(self, run: str = "") -> None:
        """``run`` names the run in ``/proc/<pid>/maps``."""
        self._run = run

    def make(self, name: str, nbytes: int, writer: str) -> int:
        """As :meth:`Medium.make`."""
        descriptor = os.memfd_create(f"cs-{self._run}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            os.fchmod(descriptor, 0o400)  # so that no reader opens it again for writing by mistake
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def found(self) -> list[tuple[str, int, str, int]]:
        """As :meth:`Medium.found`: there is none, because a memfd ends with its supervisor."""
        return []

    def open_reader(self, descriptor: int) -> int:
        """As :meth:`Medium.open_reader`."""
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Files:
    """A file for each segment in a directory of a tmpfs, as a volume that containers share is one.

    A file is as long as its reservation and takes what is touched of it; whoever writes asks the file system first
    (:meth:`cs_runtime.shared_memory.mapping.Mapping.reserve`). The files stay until the run directory is cleared.
    """

    title = "shared memory (files in the run directory)"
    is_shared = True

    def __init__(self, directory: str) -> None:
        """``directory`` is the run directory."""
        self._directory = directory

    def make(self, name: str, nbytes: int, writer: str) -> int:
        """As :meth:`Medium.make`; the file is called ``segment.<writer>.<name>``, with commas for the slashes."""
        path = os.path.join(self._directory, f"segment.{writer or _NOBODY}.{name.replace('/', ',')}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
        try:
            os.ftruncate(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return descriptor

    def found(self) -> list[tuple[str, int, str, int]]:
        """As :meth:`Medium.found`. Raises OSError where one of them cannot be opened."""
        segments = []
        for file in sorted(os.listdir(self._directory)):
            if not file.startswith("segment."):
                continue
            _, writer, name = file.split(".", 2)
            path = os.path.join(self._directory, file)
            os.chmod(path, 0o600, follow_symlinks=False)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.fchmod(descriptor, 0o400)
            nbytes = os.fstat(descriptor).st_size
            if nbytes:
                segments.append((name.replace(",", "/"), nbytes, "" if writer == _NOBODY else writer, descriptor))
            else:  # the supervisor was killed while it made it
                os.close(descriptor)
                os.unlink(path)
        return segments

    def open_reader(self, descriptor: int) -> int:
        """As :meth:`Medium.open_reader`."""
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Unshared(Memfd):
    """Memory that only the server maps."""

    title = "bytes in frames"
    is_shared = False


@frozen
class _Kept:
    reservation: int
    writer: str
    descriptor: int


class Memory:
    """The segments of one run by name."""

    def __init__(self, medium: Medium) -> None:
        """What a supervisor before this one has left in ``medium`` is there at once. Raises OSError where it cannot be
        opened."""
        self.medium = medium
        self._kept = {name: _Kept(nbytes, writer, opened) for name, nbytes, writer, opened in medium.found()}
        self._is_watched = False

    def make(self, asker: str, request: MakeSegment) -> tuple[Segment, int | None]:
        """Make a segment, or return the existing one, in its present length, to a server that was started again.

        ``asker`` is ``server``, ``w0``, ``controller`` or anything else. The answer, and a descriptor that the caller
        closes when it is sent. Raises ContextError for another asker than the server, InvalidArgumentError if the
        segment exists for another writer or ``writer`` is unknown, MemoryPlanError if the kernel refuses.
        """
        _check_server(asker, request.segment)
        if _WRITER.fullmatch(request.writer) is None:
            raise InvalidArgumentError(
                f"{request.writer!r:.60} is not a writer; a writer is '', 'controller', or 'w0', 'w1', ..."
            )
        kept = self._kept.get(request.segment)
        if kept is None:
            kept = self._kept[request.segment] = self._new(request)
            self._note_watched(request.segment, kept)
        elif kept.writer != request.writer:
            raise InvalidArgumentError(
                f"segment {request.segment} exists with writer {kept.writer!r}, not writer {request.writer!r}"
            )
        return self.open(asker, request.segment)

    def extend(self, asker: str, request: ExtendSegment) -> tuple[Segment, int | None]:
        """Make a segment longer, if it is shorter than the reservation (bytes) of ``request``. Existing mappings do not
        change.

        Returns the answer, and a descriptor that the caller closes when it is sent. Raises ContextError for another
        asker than the server, InvalidArgumentError for an unknown name, MemoryPlanError where the kernel refuses.
        """
        _check_server(asker, request.segment)
        kept = self._kept.get(request.segment)
        if kept is not None and kept.reservation < request.reservation:
            try:
                os.ftruncate(kept.descriptor, request.reservation)
            except OSError as error:
                raise _refusal(request.segment, request.reservation, error) from error
            self._kept[request.segment] = with_changes(kept, reservation=request.reservation)
        return self.open(asker, request.segment)

    def open(self, asker: str, name: str) -> tuple[Segment, int | None]:
        """A segment for ``asker``: writable for the server and its named writer, a replica's arena for the controller,
        and read-only for everybody else.

        The answer, and a descriptor that the caller closes when it is sent; None where the medium is not shared with
        ``asker``. Raises InvalidArgumentError for an unknown name, MemoryPlanError where the kernel refuses.
        """
        kept = self._kept.get(name)
        if kept is None:
            known = ", ".join(list(self._kept)[:20]) or "none at all"
            raise InvalidArgumentError(f"there is no segment {name!r:.120}; there are {known}")
        writable = asker in ("server", kept.writer) or (asker == "controller" and _ARENA.fullmatch(name) is not None)
        if asker != "server" and not self.medium.is_shared:
            return Segment(name, kept.reservation, writable), None
        try:
            descriptor = os.dup(kept.descriptor) if writable else self.medium.open_reader(kept.descriptor)
        except OSError as error:
            raise _refusal(name, kept.reservation, error) from error
        return Segment(name, kept.reservation, writable), descriptor

    def note_watched(self, is_watched: bool) -> None:
        """Say in all rings of step times whether anybody reads them."""
        self._is_watched = is_watched
        for name, kept in self._kept.items():
            self._note_watched(name, kept)

    def _note_watched(self, name: str, kept: _Kept) -> None:
        if segment_names.is_times(name):
            try:
                os.pwrite(kept.descriptor, bytes([self._is_watched]), 8 * step_times.WATCHED)
            except OSError as error:  # the volume of the segments is full
                _log.warning("%s: %s; its step times are not kept", name, error.strerror)

    def close(self) -> None:
        """Release every segment; memory that no other process maps is freed. Idempotent."""
        for kept in self._kept.values():
            os.close(kept.descriptor)
        self._kept.clear()

    def _new(self, request: MakeSegment) -> _Kept:
        try:
            descriptor = self.medium.make(request.segment, request.reservation, request.writer)
        except OSError as error:
            raise _refusal(request.segment, request.reservation, error) from error
        return _Kept(request.reservation, request.writer, descriptor)


def _check_server(asker: str, name: str) -> None:
    if asker != "server":
        raise ContextError(f"only the server may make segments; {asker} asked for {name}")


def _refusal(name: str, nbytes: int, error: OSError) -> MemoryPlanError:
    remedy = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return MemoryPlanError(f"segment {name} of {nbytes} bytes: {error.strerror}{remedy}")
