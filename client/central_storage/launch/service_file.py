"""The file ``service.json`` in a run directory: what ``cs-ctl`` shows of a service without asking it.

The supervisor writes it when it starts, and again when it knows more. Nobody else writes it. Only supervisors and
``cs-ctl`` use this module.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from cs_proto.frozen import fields_of, frozen, with_changes
from cs_runtime.private_files import read_file

__all__ = ["FILE", "Kind", "ServiceFile", "origin", "typed"]

_log = logging.getLogger("central_storage.launch")

#: Its name in the run directory.
FILE = "service.json"
_DRAFT = f"{FILE}.draft"

#: Who started the service: ``cs-launch``, a script, a notebook, ``cs-launch --serve``, or a script that runs all of it
#: in threads.
Kind = Literal["launcher", "script", "notebook", "serve", "in-process"]

_SCRIPT_LIMIT = 500
# Options of Python that have a value.
_WITH_VALUES = ("-W", "-X", "--check-hash-based-pycs")
# What Ray calls a process that runs an actor or a task, such as ray::Trial.train, in place of its command line.
_OF_RAY = "ray::"
# No clock shows a later time, in seconds.
_LATEST = 1 << 37


@frozen
class ServiceFile:
    """What is known of a service."""

    #: How people name it: the script's stem and four digits of its run, or the name of the run directory if it was
    #: given one.
    name: str
    #: What the user typed: the script and its arguments.
    script: str
    #: The working directory.
    directory: str
    kind: Kind
    #: The pid of the supervisor, which is the launcher or, for a service in threads, the script itself.
    supervisor: int
    #: The pid of the script; 0 if there is none, or none yet.
    script_pid: int
    #: When the service began, in seconds of Unix time.
    since: float
    #: The devices of the replicas in short form; none while the script has not chosen, or if workers name their own.
    devices: tuple[str, ...]
    parameter_device: str
    #: The directory with all that server and workers print; "" if there is none.
    log_directory: str
    #: What Prometheus scrapes, and the file with the token that it must show; "" if there are no metrics.
    metrics: str
    metrics_token_file: str
    #: Where observers from other machines are admitted; "" if nowhere.
    listen: str

    @classmethod
    def of(
        cls,
        run_directory: str,
        script: str,
        kind: Kind,
        devices: Sequence[str] = (),
        parameter_device: str = "",
        *,
        script_pid: int = 0,
        log_directory: str | None = None,
        metrics: str = "",
        metrics_token_file: str = "",
        listen: str = "",
    ) -> ServiceFile:
        """The file of a service whose supervisor is this process."""
        named = PurePath(run_directory).name
        if named.startswith("cs-"):
            stem = "serve" if kind == "serve" else _stem(script)
            named = f"{stem}-{named.removeprefix('cs-')[:4]}"
        return cls(
            named,
            script,
            _working_directory(),
            kind,
            os.getpid(),
            script_pid,
            time.time(),
            tuple(devices),
            parameter_device,
            log_directory or "",
            metrics,
            metrics_token_file,
            listen,
        )

    def write(self, run_directory: str, **changes: Any) -> ServiceFile:
        """Put it, with ``changes``, in place of what is there, and return it. If it cannot be written, a warning says
        so, and the service goes on."""
        changed = with_changes(self, **changes) if changes else self
        draft = os.path.join(run_directory, _DRAFT)
        try:
            with suppress(FileNotFoundError):
                os.unlink(draft)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({name: getattr(changed, name) for name in _FIELDS}, file)
            os.replace(draft, os.path.join(run_directory, FILE))
        except OSError as error:
            _log.warning("%s/%s cannot be written (%s): cs-ctl shows less", run_directory, FILE, error.strerror)
        return changed

    @classmethod
    def read(cls, run_directory: str) -> ServiceFile | None:
        """The file in ``run_directory``. None if there is none that this version can read."""
        try:
            read = json.loads(read_file(os.path.join(run_directory, FILE)))
            values = [read.get(name, "") if name in _LATER else read[name] for name in _FIELDS]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        devices = read["devices"]
        if not isinstance(devices, list) or not all(isinstance(each, str) for each in devices):
            return None
        values[_FIELDS.index("devices")] = tuple(devices)
        is_right = all(isinstance(value, _TYPES.get(name, str)) for name, value in zip(_FIELDS, values, strict=True))
        found = cls(*values) if is_right and read["kind"] in get_args(Kind) else None
        return found if found is not None and _is_possible(found) else None


_FIELDS = fields_of(ServiceFile)
# A service of an older version has none of these.
_LATER = ("metrics", "metrics_token_file", "listen")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "supervisor": int,
    "script_pid": int,
    "since": (int, float),
    "devices": tuple,
}


def _is_possible(file: ServiceFile) -> bool:
    """Whether its numbers can be pids and a time."""
    pids = file.supervisor, file.script_pid
    return all(type(pid) is int and 0 <= pid < 1 << 31 for pid in pids) and 0 <= file.since < _LATEST


def typed(words: Sequence[str]) -> str:
    """What the user typed, in one line that is not too long."""
    return " ".join(shlex.join(words).split())[:_SCRIPT_LIMIT]


def origin() -> tuple[str, Kind]:
    """What the user of this process typed, and whether it is a script or a notebook. A prompt of Python counts as a
    notebook: who is interrupted there goes on. For an actor or a task of Ray, it is what ``ps`` shows: Ray has typed
    the rest."""
    if (title := _title()).startswith(_OF_RAY):
        return typed([title]), "script"
    if "ipykernel.kernelapp" in sys.modules:
        return os.environ.get("JPY_SESSION_NAME") or "notebook", "notebook"
    is_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if sys.argv[:1] in ([], [""], ["-"]):  # there is no script
        return ("interactive", "notebook") if is_prompt else ("stdin", "script")
    return typed(sys.orig_argv[1:]), "notebook" if is_prompt else "script"


def _title() -> str:
    """What this process calls itself."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0", 1)[0].decode(errors="replace")


def _stem(script: str) -> str:
    """``train`` of ``train.py --rate 0.1``, of ``-m project.train``, and of ``ray::train``."""
    script = script.removeprefix(_OF_RAY)
    try:
        words = shlex.split(script)
    except ValueError:  # it was cut
        words = script.split()
    if "-c" in words[:3]:
        return "python"
    if "-m" in words[:3]:
        stem = "".join(words[words.index("-m") + 1 :][:1]).rsplit(".", 1)[-1]
    else:
        values = {place + 1 for place, word in enumerate(words) if word in _WITH_VALUES}
        named = (word for place, word in enumerate(words) if not word.startswith("-") and place not in values)
        stem = PurePath(next(named, "")).stem
    kept = "".join(char if char.isalnum() or char in "_-" else "-" for char in stem)[:24].strip("-")
    return kept or "python"


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
