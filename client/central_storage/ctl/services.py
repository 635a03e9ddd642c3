"""The services of this user: where they are, which are left over, and which one somebody means."""

from __future__ import annotations

import os
from functools import cached_property

from central_storage.launch import run_directory
from central_storage.launch.service_file import ServiceFile
from cs_proto.errors import LaunchError
from cs_proto.printable import printable
from cs_runtime.transport.supervisor_link import checked

from . import processes

__all__ = ["Entry", "choose", "clean", "find"]


class Entry:
    """A run directory, as its file ``service.json`` describes it."""

    def __init__(self, path: str, file: ServiceFile | None) -> None:
        #: The run directory, which is the address of the service.
        self.path = path
        #: None if it has no such file: the service has just begun, or is of another version.
        self.file = file

    def __repr__(self) -> str:
        return f"<Entry {self.name} in {self.path}>"

    @property
    def name(self) -> str:
        """The name of the service."""
        return self.file.name if self.file is not None else os.path.basename(self.path)

    @cached_property
    def is_stale(self) -> bool:
        """Whether the service is over, and was killed before it could remove its directory."""
        if os.path.exists(os.path.join(self.path, "lock")) or self.file is not None:
            return run_directory.is_free(self.path)
        return False  # its supervisor may be about to lock it

    @property
    def is_beginning(self) -> bool:
        """Whether its supervisor lives, and does not listen yet."""
        return run_directory.is_beginning(self.path)

    @property
    def is_held(self) -> bool:
        """Whether its supervisor lives."""
        return not run_directory.is_free(self.path)

    @property
    def script_pid(self) -> int:
        """The pid of the script; 0 if there is none. The kernel says that it is still the same process: it is parent or
        child of the supervisor."""
        file = self.file
        if file is None or not file.script_pid:
            return 0
        if file.script_pid == file.supervisor:
            return file.script_pid
        script, supervisor = processes.status(file.script_pid), processes.status(file.supervisor)
        is_kin = (
            script is not None
            and supervisor is not None
            and (supervisor.pid == script.parent or script.pid == supervisor.parent)
        )
        return file.script_pid if is_kin else 0

    @property
    def pids(self) -> list[int]:
        """The processes of the service on this machine: the supervisor, the script, and what the supervisor has
        started."""
        if self.file is None:
            return []
        started = [child.pid for child in processes.descendants(self.file.supervisor)]
        return list(dict.fromkeys([self.file.supervisor, *filter(None, [self.script_pid]), *started]))


def find() -> list[Entry]:
    """All services of this user, the oldest first; those that are over and have left their directory, too."""
    entries = [Entry(path, ServiceFile.read(path)) for path in run_directory.known()]
    kept = [entry for entry in entries if entry.file is not None or os.path.exists(os.path.join(entry.path, "lock"))]
    return sorted(kept, key=lambda entry: (entry.file.since if entry.file else 0.0, entry.path))


def clean() -> None:
    """Remove what stale services have left behind in the usual places; of a directory that the user has named only the
    link that registered it, since another supervisor may take up its run."""
    run_directory.clean_up()


def choose(text: str | None = None) -> Entry:
    """The service that ``text`` means: its name or the beginning of it, a pid of one of its processes, or its run
    directory. None: that of ``CS_ADDRESS``, else the only one that runs.

    Raises LaunchError, with the names of those that run, if there is none or if there are several, and for one whose
    run directory is not this user's alone.
    """
    if text == "":  # of a variable of a shell that is not set, perhaps: the only service is not meant
        raise LaunchError("no service has an empty name; cs-ctl ls lists the names")
    text = text or os.environ.get("CS_ADDRESS") or None
    if text is not None and text.startswith("tcp://"):
        raise LaunchError(f"{text:.200} is an address on a network, and cs-ctl looks at services here: run it there")
    if text is not None and ("/" in text or text in (".", "..")):
        return _at(text)
    running = [entry for entry in find() if not entry.is_stale]
    if text is None:
        found = running
    else:
        found = [entry for entry in running if text in (entry.name, os.path.basename(entry.path))]
        found = found or [entry for entry in running if entry.name.startswith(text)]
        if not found and text.isdecimal():
            found = [entry for entry in running if text in map(str, entry.pids)]
        if not found and os.path.isdir(text):
            return _at(text)
    if len(found) == 1:
        checked(found[0].path)
        return found[0]
    listed = "; ".join(f"{printable(entry.name)} in {printable(entry.path)}" for entry in found or running) or "none"
    if found:
        which = "several services run" if text is None else f"{text!r} means several services"
        raise LaunchError(f"{which}, name one of them: {listed}")
    raise LaunchError("no service runs" if text is None else f"no service is called {text!r}; these run: {listed}")


def _at(path: str) -> Entry:
    path = os.path.realpath(path)
    if os.path.isdir(path) and not os.access(path, os.X_OK):
        checked(path)  # it names the user to whom the directory belongs
    if os.path.exists(os.path.join(path, "lock")):
        entry = Entry(checked(path), ServiceFile.read(path))
        if not entry.is_stale:
            return entry
    raise LaunchError(f"no service runs in {path}")
