"""The run directory: a private directory with the sockets of one run; how it is made, locked and removed.

Its supervisor keeps its file ``lock`` locked, because libzmq would let a second server take over a live address without
an error. The kernel releases the lock whatever kills the holder. So a directory whose lock is free is abandoned, and
the next start removes it. A directory that the user has named is registered by a symbolic link where the others are,
so that ``cs-ctl`` finds all of them. Only supervisors, ``cs-ctl`` and a script whose supervisor was killed use this
module.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from cs_proto.errors import ConfigurationError, LaunchError
from cs_runtime.ancestors import why_replaceable
from cs_runtime.private_files import read_file

__all__ = ["RunDirectory", "clean_up", "is_beginning", "is_free", "known", "place"]

_log = logging.getLogger("central_storage.launch")

_NAME = re.compile(r"cs-[0-9a-f]{8}")
# The files of a run in its directory, except log files.
_CONTENT = re.compile(
    r"lock|server|supervisor|error|saving|run|run\.draft|service\.json(\.draft)?|metrics-token|"
    r"w[0-9]+\.[0-9]+|segment\..+"
)
# The files to remove when a run is taken up: the sockets of the killed processes.
_STALE = re.compile(r"server|supervisor")
# sockaddr_un holds 107 bytes of path, of which the longest name of a socket here may take 20, like its processes say.
_PATH_NBYTES = 107
_LONGEST_NAME = 20
# How often a lock that is held is tried again, and the seconds between two tries.
_TRIES, _TRY_EVERY = 5, 0.01


class RunDirectory:
    """A directory of mode 0700, held by this process until :meth:`remove`."""

    def __init__(
        self,
        path: str | None = None,
        *,
        keep: bool = False,
        is_taken_up: Callable[[str], bool] | None = None,
    ) -> None:
        """Make and hold ``path``, or a fresh directory in a place for run-time files.

        ``keep`` leaves its files (log files) when the run ends. ``is_taken_up`` is called when ``path`` is locked, and
        tells whether the run of a killed supervisor continues; otherwise the files of that run are removed. Raises
        LaunchError if another living process holds ``path`` or if no place is suitable, ConfigurationError if ``path``
        is too long, not UTF-8, not a private directory of this user, or below a directory in which others may replace
        it. :attr:`path` has no symbolic links, which others could change.
        """
        self.keep = keep
        self._link: str | None = None
        clean_up()
        if path is None:
            self.path, self._lock = _fresh()
            self._ours = True
        else:
            self.path = os.path.realpath(path)
            self._ours = not os.path.exists(self.path)
            self._lock = _take(self.path, is_taken_up or _never)
            self._link = _register(self.path)
        self.name = os.path.basename(self.path).removeprefix("cs-")

    def remove(self) -> None:
        """Remove the directory if this process made it and it is not to be kept, otherwise only the files of the run.
        Release the lock. Idempotent."""
        if self._lock < 0:
            return
        if self._ours and not self.keep:
            _remove_tree(self.path)
        else:
            try:
                _remove_content(self.path)
            except OSError as error:  # something else has the name of one of our files
                _log.warning("could not remove %s: %s", error.filename, error.strerror)
        if self._link is not None:
            _unlink(self._link)
        self.forget()

    def forget(self) -> None:
        """Release the lock and leave the directory as it is, in a forked child. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def clean_up() -> None:
    """Remove the run directories of this user's runs that no process holds any more, and nothing else: of directories
    that users have named only the links."""
    for place in filter(_is_safe, _places()):
        for entry in _scan(place):
            if not _NAME.fullmatch(entry.name):
                continue
            if _is_ours(entry.path):
                _remove_if_dead(entry.path)
            elif _is_our_link(entry.path) and is_free(entry.path):
                _unlink(entry.path)


def known() -> list[str]:
    """The run directories of this user that are in the usual places or registered there, whether a process holds them
    or not; none that others could replace."""
    runtime = f"/run/user/{os.geteuid()}"  # of services that were started in a login session, if this is none
    found = []
    for place in filter(_is_safe, dict.fromkeys([*_places(), runtime])):
        for entry in _scan(place):
            path = os.path.realpath(entry.path)
            is_named = _NAME.fullmatch(entry.name) is not None
            if is_named and (_is_ours(entry.path) or _is_our_link(entry.path)) and _is_ours(path):
                found += [] if why_replaceable(path) else [path]
    return list(dict.fromkeys(found))


def place() -> str | None:
    """Where new run directories are made; None if no place is suitable."""
    return next((place for place in _places() if _why_unusable(place) is None), None)


def is_free(path: str) -> bool:
    """Whether no process holds the run directory."""
    try:
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file system has no locks
        return False
    else:
        return True
    finally:
        os.close(lock)


def is_beginning(path: str) -> bool:
    """Whether a supervisor holds the run directory and does not listen yet. It listens before it starts a server, so a
    directory with the socket of a server alone has lost that of the supervisor."""
    has_sockets = any(os.path.exists(os.path.join(path, name)) for name in ("supervisor", "server"))
    return not has_sockets and not is_free(path)


def _register(path: str) -> str | None:
    """Make a link to a directory that the user has named, where :func:`known` finds it; None if that is not needed, or
    not possible."""
    where = place()
    if where is None or (os.path.dirname(path) in _places() and _NAME.fullmatch(os.path.basename(path))):
        return None
    link = os.path.join(where, f"cs-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}")
    _unlink(link)
    try:
        os.symlink(path, link)
    except OSError as error:
        _log.warning("cs-ctl ls does not show this service: %s cannot be made (%s)", link, error.strerror)
        return None
    return link


def _unlink(link: str) -> None:
    with suppress(OSError):  # it is gone, or is no link
        os.unlink(link)


def _is_our_link(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid()


def _fresh() -> tuple[str, int]:
    found = {place: _why_unusable(place) for place in _places()}
    for place, objection in found.items():
        if objection is None:
            try:
                return _made_in(place)
            except OSError as error:  # it is full, perhaps
                found[place] = f"nothing can be made ({error.strerror})"
    objections = "; ".join(f"in {place}, {objection}" for place, objection in found.items())
    raise LaunchError(
        f"there is no place for a run directory: {objections}; set XDG_RUNTIME_DIR or TMPDIR to a private directory "
        "with a short path"
    )


def _made_in(place: str) -> tuple[str, int]:
    """A new run directory in a place, and its lock. Raises OSError, and leaves nothing then."""
    while True:
        path = os.path.join(place, f"cs-{os.urandom(4).hex()}")
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            try:
                lock = _lock(path)
            except OSError:
                _remove_tree(path)
                raise
            if lock is not None:  # otherwise the clean-up of another start has removed it before it was locked
                return path, lock


def _never(path: str) -> bool:
    return False


def _is_text(path: str) -> bool:
    """Whether its bytes are UTF-8, which messages and files about it need."""
    return not any("\ud800" <= char <= "\udfff" for char in path)


def _take(path: str, is_taken_up: Callable[[str], bool]) -> int:
    if not _is_text(path):
        raise ConfigurationError(f"the run directory {path!a} is not UTF-8 text; choose another name")
    if len(os.fsencode(path)) + _LONGEST_NAME > _PATH_NBYTES:
        raise ConfigurationError(
            f"the run directory {path} is too long: a socket's path has at most {_PATH_NBYTES} bytes"
        )
    _refuse_replaceable(path)  # before anything is made
    try:
        _make(path)
    except OSError as error:
        raise ConfigurationError(f"the run directory {path} cannot be made: {error.strerror}") from error
    if not _is_ours(path) or stat.S_IMODE(os.lstat(path).st_mode) & 0o077:
        raise ConfigurationError(
            f"the run directory {path} must belong to you and be closed to other users (chmod 700)"
        )
    _refuse_replaceable(path)  # somebody may have been quicker
    try:
        lock = _lock(path)
        for _ in range(_TRIES):
            if lock is None:  # who looks whether it is free holds it for a moment
                time.sleep(_TRY_EVERY)
                lock = _lock(path)
        if lock is None:
            holder = read_file(os.path.join(path, "lock")).decode(errors="replace").strip() or "unknown"
            raise LaunchError(
                f"the run directory {path} is held by another run (supervisor pid {holder}); choose another one"
            )
        with ExitStack() as undo:
            undo.callback(os.close, lock)
            # Of a run that was killed.
            _remove_content(path, _STALE if is_taken_up(path) else _CONTENT, but="lock")
            undo.pop_all()
    except OSError as error:
        raise ConfigurationError(
            f"the run directory {path} cannot be used: {error.filename}: {error.strerror}; put that right, or choose "
            "another directory"
        ) from error
    return lock


def _refuse_replaceable(path: str) -> None:
    if objection := why_replaceable(path):
        raise ConfigurationError(f"other users could replace the run directory {path}: {objection}")


def _make(path: str) -> None:
    """Make the directory, and those above it that are missing, closed to others whatever the umask. Raises OSError."""
    if not os.path.isdir(parent := os.path.dirname(path)):
        _make(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _lock(path: str) -> int | None:
    """The locked ``lock`` file of the directory, with our pid in it; None if another process holds it."""
    name = os.path.join(path, "lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino != os.stat(name).st_ino:  # it was removed and made again in between
            raise FileNotFoundError
        os.truncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except (BlockingIOError, FileNotFoundError):
        os.close(lock)
        return None
    except OSError as error:  # the file system is full, or has no locks
        os.close(lock)
        raise OSError(error.errno, error.strerror, name) from error
    return lock


def _remove_if_dead(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        with suppress(OSError):  # kept log files, or one just being made: rmdir takes only what is empty
            os.rmdir(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_tree(path)
        _log.info("removed %s, left behind by a run that was killed", path)
    except OSError:
        pass  # alive, or on a file system without locks
    finally:
        os.close(lock)


def _remove_content(path: str, what: re.Pattern[str] = _CONTENT, but: str = "") -> None:
    for entry in _scan(path):
        if what.fullmatch(entry.name) and entry.name != but:
            os.unlink(entry)


def _remove_tree(path: str) -> None:
    import shutil  # late: what it and tempfile import takes a twelfth of a supervisor's start

    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # the clean-up of another start is removing it, too
    except OSError as error:
        _log.warning("could not remove %s: %s", path, error)


def _places() -> list[str]:
    """Where run directories may be, the preferred place first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [runtime] if _is_ours(runtime) else []
    for path in filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))):  # as tempfile
        with suppress(FileNotFoundError):  # a relative one, in a working directory that is gone
            places.append(os.path.abspath(path))
    # The last for a container with a read-only file system and a volume at /tmp to which all may write.
    return list(dict.fromkeys(map(os.path.realpath, [*places, "/tmp", "/var/tmp", "/dev/shm"])))


def _why_unusable(place: str) -> str | None:
    """Why no run directory can be made in a place; None if one can."""
    length = len(os.fsencode(place)) + len("/cs-01234567") + _LONGEST_NAME
    if length > _PATH_NBYTES or not _is_text(place):
        return "the paths of sockets would be too long, or not UTF-8"
    if not os.access(place, os.W_OK | os.X_OK):
        return "this user may not write"
    return why_replaceable(os.path.join(place, "cs"))


def _is_safe(place: str) -> bool:
    """Whether nobody else can put a directory into the place of one that lies there."""
    return why_replaceable(os.path.join(place, "cs")) is None


def _is_ours(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _scan(place: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            yield from list(entries)
    except OSError:
        return  # a place that is not there holds nothing of ours
