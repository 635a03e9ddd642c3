"""What the engine commands of the server's memory: commits, computations, and memory that is made and given back.

Owns the words at the head of the control segment, by which peers see that variables change. It talks to no peer;
``service`` sends what is to be sent.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Iterable

import numpy as np

from cs_proto import segment_names as names
from cs_proto.arrays import Array
from cs_proto.errors import CentralStorageError, ShutdownError
from cs_proto.failures import error_of
from cs_proto.frozen import with_changes
from cs_runtime import machine
from cs_runtime.failpoints import failpoint
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.trace import moments

from .compute import undo
from .compute.executor import Executor
from .compute.prepared import Prepared
from .compute.programs import Instruction, Op
from .config import ServerConfig
from .engine.store.address_budget import Addresses
from .engine.store.versions import Versions
from .events import (
    Allocate,
    Command,
    Commit,
    Compute,
    Computed,
    Discard,
    Event,
    Fingerprint,
    Fingerprinted,
    Finished,
    FreeResults,
    Load,
    LoadKernel,
    MemoryAvailable,
    Needed,
    Renamed,
    Reserve,
    Reserved,
)
from .memory.segments import Segments
from .numerics import Numerics
from .variable_store import VariableStore, open_store

__all__ = ["CommandRunner", "open_runner"]

_log = logging.getLogger("cs_server.service")
_moment = moments("server")

# What heads the control segment, in words of 8 bytes: twice the number of commits, odd within one, and how often
# something moved or got another name.
_WORD_NBYTES = 8
_COMMITS, _LAYOUT = 0, 1


class CommandRunner:
    """Carries out commands on the memory of one server. Used by one thread."""

    def __init__(
        self, segments: Segments, store: VariableStore, arithmetic: Executor, results: Arena, numerics: Numerics
    ) -> None:
        """``results`` is where ``arithmetic`` puts what it computes. The control segment and that of the versions have
        been made. ``numerics`` is told of commits in which a sum of gradients was not finite."""
        self._segments = segments
        #: Where the variables lie.
        self.store = store
        self._arithmetic = arithmetic
        self._results = results
        self._numerics = numerics
        counts = segments.elements(names.CONTROL, "uint8")[: 2 * _WORD_NBYTES]
        self._counts, self._counts_address = counts.data.cast("Q"), counts.__array_interface__["data"][0]
        self._versions = Versions(segments.elements(names.versions(), "uint64"))

    def close(self) -> None:
        """End the threads of the arithmetic, and give the store back."""
        self.store.close()

    def available(self) -> MemoryAvailable:
        """How much memory there is."""
        free, available = self._segments.get(names.CONTROL).free_nbytes, machine.available_nbytes()
        return MemoryAvailable(available if free is None else min(available, free), self.store.available_nbytes())

    def carry_out(self, command: Command) -> Event | None:
        """Carry out ``command``; the event that tells the engine of its outcome, if it has one."""
        match command:
            case Commit():
                return self._commit(command)
            case Compute():
                return self._computed(command)
            case Fingerprint(ticket, arrays):
                return Fingerprinted(ticket, self._digest(arrays))
            case Reserve(needed, asked):
                return self._reserved(needed, asked)
            case Allocate() | LoadKernel():
                self._make(command)
            case Load(segment, start, stop):
                self.store.make(segment, start, stop, load=True)
            case Discard(segment, start, stop):
                self._counts[_LAYOUT] += 1
                self.store.discard(segment, start, stop)
            case Renamed():
                self._counts[_LAYOUT] += 1
            case FreeResults():
                self._results.reset()
        return None

    def prepare(self, command: Commit) -> Prepared | None:
        """A commit that a program can carry out, with the instructions of :meth:`instructions`. None if none can."""
        return self.store.prepare(command.operations)

    def instructions(self, command: Commit, prepared: Prepared) -> list[Instruction]:
        """What carries out ``command`` and later commits of the same places, if each has been prepared before. The
        commit before must be finished."""
        commits = self._counts_address + _COMMITS * _WORD_NBYTES
        versions = [(Op.ADD, address, 1, 0) for address in self._versions.addresses(command)]
        return [(Op.ADD, commits, 1, 0), *versions, *prepared.instructions, (Op.ADD, commits, 1, 0)]

    def heed_alarm(self, command: Commit, step: tuple[str, int] | None = None) -> bool:
        """Whether a sum of gradients in ``command``, which is carried out, was not finite. It is looked into, so the
        replicas must not have gone on. ``step``: as in `Numerics.look`."""
        if not self._arithmetic.alarm[0]:
            return False
        self._numerics.look(command, step)
        failpoint("server.looked")
        self._arithmetic.alarm[0] = 0
        return True

    def _commit(self, command: Commit) -> Finished:
        self._counts[_COMMITS] |= 1  # odd from here, also where a server before this one was killed
        failpoint("server.commit")
        self._versions.count(command)
        self.store.commit(command)
        self.heed_alarm(command)
        failpoint("server.committed")
        self._counts[_COMMITS] += 1
        _moment("committed")
        return Finished(command.ticket)

    def _computed(self, command: Compute) -> Computed:
        try:
            return Computed(command.ticket, self._arithmetic.compute(command), None)
        except ShutdownError:
            raise
        except Exception as error:  # noqa: BLE001  (nothing has changed, and the replicas are told)
            return Computed(command.ticket, (), error_of(error))

    def _digest(self, arrays: Iterable[Array]) -> bytes:
        made = hashlib.blake2b(digest_size=16)
        for array in arrays:
            made.update(np.ascontiguousarray(self.store.view(array)).reshape(-1).view(np.uint8).data)
        return made.digest()

    def _make(self, needed: Needed) -> None:
        if isinstance(needed, LoadKernel):
            self.store.load_kernel(needed.rule, needed.dtype)
            return
        made = self._segments.make(needed.segment, needed.reservation, needed.writer, needed.stop)
        (made.reserve if needed.is_lazy else made.populate)(needed.start, needed.stop)
        self.store.make(needed.segment, needed.start, needed.stop)

    def _reserved(self, needed: Iterable[Needed], asked: Reserved) -> Reserved:
        """Have ready what an event needs, or undo what cannot be done whole: others may have taken the memory since it
        was planned."""
        granted = list(asked.granted)
        for each in needed:
            try:
                self._make(each)
            except ShutdownError:
                raise
            except CentralStorageError as error:
                _log.warning("%s", error)
                if isinstance(each, Allocate) and each.segment in self._segments:
                    self.store.discard(each.segment, each.start, each.stop)
                refused = (*asked.refused, (each, error_of(error)))
                return with_changes(asked, granted=tuple(granted), refused=refused)
            granted.append(each)
        return with_changes(asked, granted=tuple(granted))


def open_runner(
    config: ServerConfig, segments: Segments, addresses: Addresses, results_nbytes: int, numerics: Numerics
) -> CommandRunner:
    """A runner over the memory of a server, whose arena holds ``results_nbytes`` that must stay. Raises DeviceError
    where a GPU cannot be used."""
    results = Arena(lambda: segments.make(names.server_arena(), addresses.arena, ""), results_nbytes)
    arithmetic = Executor(segments, config.threads, results.place, _undo_memory(config, segments))
    store = open_store(config, segments, arithmetic, addresses.slab)
    segments.get(names.versions()).reserve(0, mmap.PAGESIZE)
    return CommandRunner(segments, store, arithmetic, results, numerics)


def _undo_memory(config: ServerConfig, segments: Segments) -> np.ndarray | None:
    if not config.recovery:
        return None
    memory = segments.make(names.UNDO, undo.UNDO_NBYTES, "")
    memory.reserve(0, undo.used_nbytes(config.threads))
    return memory.elements("uint8")
