"""A worker's records of variables and optimizers, and its views of the server's memory.

The place of a variable does not change until it is freed, so the worker asks the server for it once. It asks for
versions, iterations and hyperparameters every time. It also keeps the handles that came from other processes: else
every run would ask anew for a captured variable. The replica, the merge controller and the loop use this.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from central_storage.variables.checks import dense_refused
from central_storage.variables.variable import Variable
from central_storage.wire_values.value_codec import to_exception
from cs_proto import messages, segment_names
from cs_proto.arrays import Array, Location, frame_view, rows_of
from cs_proto.errors import InvalidArgumentError, MemoryPlanError, VariableWrittenError
from cs_proto.records import Record, replace
from cs_proto.scatter import write
from cs_proto.sizes import in_units
from cs_runtime import machine
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment, aligned
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_worker.devices.device import Device
from cs_worker.session.conversation import Conversation

from .written_pages import WrittenPages

if TYPE_CHECKING:
    from central_storage.strategy.service_strategy import CentralStorageStrategy

__all__ = ["Catalogue", "overlay"]

_log = logging.getLogger("central_storage.worker")

R = TypeVar("R", bound=Record)

# The places of gradients are kept as lists for so many sets of variables.
_SETS_KEPT = 64
# Variables lie side by side at multiples of this.
_ALIGNMENT = 64
# The most characters of a variable's name in a line that must stay short.
_NAME_LENGTH = 100
# The most variables that an error names.
_NAMED = 4


class Catalogue:
    """Records by number, and mapped arrays."""

    def __init__(
        self, conversation: Conversation, lifeline: SupervisorLink, replica: int, device: Device, parameter_device: str
    ) -> None:
        self._conversation = conversation
        self._lifeline = lifeline
        self._replica = replica
        self._device = device
        self._versions: np.ndarray | None = None
        # Where variables lie on the server's GPU, if it keeps them on one, since the last start of the server.
        #: Whether the server keeps all variables in host memory.
        self.is_on_host = not parameter_device.startswith("gpu:")
        self._may_be_located = parameter_device.startswith("gpu:") and not device.is_host
        self._located: dict[tuple[int, int], messages.DevicePlace] = {}  # by number and set of gradient buffers, or -1
        self._located_at = 0
        #: Whether gradients on the server's GPU must be in their segments, too.
        self.keeps_gradients = True
        self._known: dict[int, messages.Variable] = {}
        #: Views of the server's own memory, for a replica on a CPU: all that it has read since the last
        #: :meth:`preserve`.
        self.mapped: dict[int, np.ndarray] = {}
        #: What this process has written in place to variables and arguments.
        self.written = WrittenPages(lifeline, replica, self.name)
        # The mapping in which each view lies. After a segment was extended, older views lie in an older mapping.
        self._mapping_of: dict[int, Mapping] = {}
        #: Another object when some of them are no longer what they were.
        self.epoch = object()
        self._views: dict[int, np.ndarray] = self.mapped if device.is_host else {}
        #: What :meth:`view` has returned of variables that are not mapped here.
        self.copies = Copies(conversation)
        self._gradients: dict[tuple[int, int], np.ndarray] = {}
        #: The dtypes whose second set of gradient buffers exists.
        self._second_gradients: set[str] = set()
        self._gradients_of: dict[tuple[tuple[int, ...], int], list[np.ndarray]] = {}
        self._handles: dict[tuple[str, int], object] = {}
        self._missed_in: object = None
        #: The one handle of the strategy in this worker. The merge controller sets it.
        self.strategy: CentralStorageStrategy

    def resolve(self, kind: str, number: int) -> object:
        """The object of this process for a handle that came from another one."""
        found = self._handles.get((kind, number))
        if found is None:
            made = None
            if kind == "variable" and self.strategy.handles.get(kind, number) is None:
                made = Variable.from_record(self.strategy, self.place(number))  # adds itself to the table
            found = self._handles[kind, number] = self.strategy.object_for(kind, number)
            assert made is None or found is made
        return found

    def place(self, number: int) -> messages.Variable:
        """The variable's record as far as it never changes: number, name, dtype, shape, where it lies."""
        known = self._known.get(number)
        if known is not None:
            return known
        run = self._conversation.session.run_under_way
        if self._missed_in == run:  # the second one in a run: there may be a thousand more, so ask for all at once
            self.variables()
        self._missed_in = run
        return self._known.get(number) or self.variable(number)

    def rename(self, number: int, name: str) -> None:
        """The variable is called ``name`` from now on."""
        record = self._known.get(number)
        if record is not None:
            self._known[number] = replace(record, spec=replace(record.spec, name=name))
        handle = self.strategy.handles.get("variable", number)
        if isinstance(handle, Variable):
            handle.rename(name)

    def forget(self, numbers: Iterable[int], optimizers: Iterable[int] = ()) -> None:
        """Forget these variables and optimizers: their places may belong to others by now. The server refuses a request
        for one."""
        numbers = list(numbers)
        self.written.forget(numbers)
        for optimizer in optimizers:
            self._handles.pop(("optimizer", optimizer), None)
        self.epoch = object()
        self._gradients_of.clear()
        gone: list[np.ndarray | None] = []
        for number in numbers:
            self._known.pop(number, None)
            for buffers in (-1, 0, 1):
                self._located.pop((number, buffers), None)
            gone.append(self._views.pop(number, None))
            self._mapping_of.pop(number, None)
            self.copies.forget(number)
            self._handles.pop(("variable", number), None)
            gone += (self._gradients.pop((number, buffers), None) for buffers in range(2))
        if not self._device.is_host:
            self._device.forget(numbers, [array for array in gone if array is not None])
            # Arrays that shared a locked range with them are mapped and locked anew.
            self._views.clear()
            self._gradients.clear()

    def name(self, number: int) -> str:
        """The variable's name."""
        return self.place(number).spec.name

    def version(self, number: int) -> int:
        """A number that changes with every commit that changes the variable. This sends no message. Where the segment
        of versions cannot be mapped, the number changes whenever the variable may have changed."""
        if self._versions is None:
            segment = self._lifeline.segment(segment_names.versions())
            if isinstance(segment, RemoteSegment):
                return self._conversation.session.waits
            self._versions = segment.elements("uint64")
        return int(self._versions[number])

    @property
    def carries(self) -> bool:
        """Whether this process cannot map the server's memory."""
        return bool(self._lifeline.carried_because)

    def is_carried(self, number: int) -> bool:
        """Whether the variable is not mapped here, so that a read fetches what it needs."""
        name = self.place(number).place.segment
        return self.carries or isinstance(self._lifeline.segment(name), RemoteSegment)

    def on_device(self, number: int) -> messages.DevicePlace | None:
        """Where the variable lies on the device of this replica, if the server keeps it there."""
        return self.gradients_on_device((number,), -1)[0]

    def gradients_on_device(self, numbers: Sequence[int], buffers: int) -> list[messages.DevicePlace | None]:
        """Where the gradients of several variables may be computed on the device of this replica, if the server keeps
        the variables there; where the variables lie, if ``buffers`` is -1."""
        if not self._may_be_located or self.carries:
            return [None] * len(numbers)
        if (start := self.version(0)) != self._located_at:
            self._located.clear()
            self._located_at = start
            self._device.close_imports()
        if not all((number, buffers) in self._located for number in numbers):
            self._locate(numbers, buffers)
        places = [self._located[number, buffers] for number in numbers]
        return [place if place.handle else None for place in places]

    def _locate(self, numbers: Sequence[int], buffers: int) -> None:
        for number in numbers:
            self.place(number)
        # Ask for all known variables, but only for the gradients that are needed, because these take memory.
        asked = tuple(n for n in (self._known if buffers < 0 else numbers) if (n, buffers) not in self._located)
        request = self._conversation.session.next_request()
        found = self.ask(messages.Locate(request, asked, buffers), request, messages.Located)
        places = found.places
        if found.uuid == self._device.uuid:
            self.keeps_gradients = found.keeps
        else:
            self._may_be_located = False
            _log.warning("transport staging: variables are on another GPU and read through the machine's memory")
            places = (messages.DevicePlace(b"", 0, 0, b""),) * len(asked)
        self._located.update(((number, buffers), place) for number, place in zip(asked, places, strict=True))

    def learn(self, record: messages.Variable) -> messages.Variable:
        """Remember a record that came with another answer."""
        self._known[record.number] = record
        return record

    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands in the server."""
        request = self._conversation.session.next_request()
        described = self.ask(messages.Describe(request, (number,), ()), request, messages.Described)
        return self.learn(described.variables[0])

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record as it stands in the server."""
        request = self._conversation.session.next_request()
        records = self.ask(messages.Get(request, (), (), False), request, messages.Got).variables
        return tuple(map(self.learn, records))

    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands in the server."""
        return self._describe_optimizer(number).optimizers[0]

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which an optimizer has slots."""
        return self._describe_optimizer(optimizer).slotted[0]

    def steps_of(self, optimizer: int) -> dict[int, int]:
        """How often an optimizer has updated each variable beside which it has slots."""
        found = self._describe_optimizer(optimizer)
        return dict(zip(found.slotted[0], found.steps[0], strict=True))

    def _describe_optimizer(self, number: int) -> messages.Described:
        request = self._conversation.session.next_request()
        return self.ask(messages.Describe(request, (), (number,)), request, messages.Described)

    def what_lies_at(self, segment: str, offset: int) -> str:
        """What lies ``offset`` bytes from the start of a segment, as text for an error. Sends no message."""
        if not segment_names.is_parameters(segment):
            return "an argument of the replica function"
        for record in self._known.values():
            first = record.place.offset
            if record.place.segment == segment and first <= offset < first + record.array.nbytes:
                shape = ", ".join(map(str, record.spec.shape))
                return f"variable {record.spec.name[:_NAME_LENGTH]!r} ({record.spec.dtype}[{shape}])"
        return "a variable"

    def slot(self, optimizer: int, variable: int, slot: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable, or of rows of it, from one number to below another; the
        server makes it where it is missing."""
        request = self._conversation.session.next_request()
        found = self.ask(messages.DescribeSlots(request, optimizer, variable), request, messages.Slots)
        array = found.arrays[found.names.index(slot)]
        return self.copy(array if rows is None else rows_of(array, *rows))

    def view(self, number: int) -> np.ndarray:
        """The variable's value: the server's own memory, read-only, the same object until :meth:`preserve`. If that
        cannot be mapped, a copy of the bytes, the same object until this replica next waits."""
        view = self._views.get(number)
        if view is None:
            view = self.copies.get(number)
        if view is None:
            record = self.place(number)
            segment = self._lifeline.segment_of(record.array)
            view = segment.view(record.array)
            if isinstance(segment, RemoteSegment):
                self.copies.keep(number, view)
            else:
                self._views[number] = view
                if self._device.is_host:
                    self._mapping_of[number] = segment
                    self.written.show(segment, record)
                elif not self.carries:
                    self._lock_slab(record.place.segment)
        return view

    def preserve(self) -> None:
        """Keep the bits of all views that the function still holds, whole or in part, through later commits. Their
        pages become private copies at the same addresses, and the next read maps the segment again. If no view is held,
        nothing is copied.

        Raises MemoryPlanError if there is no memory for that, and VariableWrittenError if something has written to the
        variables: their pages would be kept as they are. Then the views still show the server's memory.
        """
        if not self.mapped:
            return
        # Everything made from a view holds the array at its base. Nothing else does, once the views here are dropped.
        bases = {number: weakref.ref(_base(view)) for number, view in self.mapped.items()}
        shapes = {number: view.shape for number, view in self.mapped.items()}
        self.epoch = object()
        self.mapped.clear()
        mapping_of, self._mapping_of = self._mapping_of, {}
        for number in bases:
            handle = self.strategy.handles.get("variable", number)
            if isinstance(handle, Variable):
                handle.forget_view()
        held = {number: base for number, ref in bases.items() if (base := ref()) is not None and base.nbytes}
        try:
            self._look_at(mapping_of, held)
            while held:
                self._preserve_in(mapping_of[next(iter(held))], mapping_of, held)
        except (MemoryPlanError, VariableWrittenError):
            self.mapped.update((number, base.reshape(shapes[number])) for number, base in held.items())
            self._mapping_of = {number: mapping_of[number] for number in held}
            raise

    def _look_at(self, mapping_of: dict[int, Mapping], held: Iterable[int]) -> None:
        """Look for writes in the mappings that are read no more after this, which are those of ``held`` and outgrown
        ones; in all where that costs little, because a commit follows. Raises VariableWrittenError."""
        mappings = set(mapping_of.values())
        if not self.written.are_small:
            leaving = {mapping_of[number] for number in held}
            mappings = leaving | {each for each in mappings if self._lifeline.segment(each.name) is not each}
        for mapping in mappings:
            self.written.look(mapping)
        self.written.refuse()

    def restore(self, numbers: Iterable[int]) -> None:
        """Show the server's values of these variables again, in the arrays that were read since the last
        :meth:`preserve`, where this process has written to them."""
        numbers = list(numbers)
        self.written.restore(numbers)
        for number in self.copies.made.keys() & set(numbers):
            copy, array = self.copies.made[number], self.place(number).array
            copy.flags.writeable = True
            copy[...] = self._lifeline.segment_of(array).view(array)
            copy.flags.writeable = False

    def _preserve_in(self, mapping: Mapping, mapping_of: dict[int, Mapping], held: dict[int, np.ndarray]) -> None:
        """Preserve the arrays that lie in one mapping, and remove them from ``held``, whose keys are variables."""
        numbers = [number for number in held if mapping_of[number] is mapping]
        starts = [self._known[number].place.offset for number in numbers]
        ranges = [(start, start + held[number].nbytes) for start, number in zip(starts, numbers, strict=True)]
        need, have = mapping.preserved_nbytes(ranges), machine.available_nbytes()
        if need > have:
            raise self._unpreserved(numbers, need, f"{have} bytes are available{in_units(have)}")
        try:
            mapping.preserve(ranges)
        except MemoryPlanError as error:
            raise self._unpreserved(numbers, need, str(error)) from error
        for number in numbers:
            del held[number]
        self.written.leave(mapping)
        self._lifeline.map_anew(mapping.name)

    def _unpreserved(self, numbers: Sequence[int], need: int, why: str) -> MemoryPlanError:
        names = ", ".join(self.name(number) for number in numbers[:_NAMED])
        names += f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
        return MemoryPlanError(
            f"{names}: {need} bytes{in_units(need)} are needed to preserve arrays that were read before an update and "
            f"are still held, but {why}; let go of the arrays before the update, or read only the rows that you need, "
            "with sparse_read"
        )

    def _lock_slab(self, segment: str) -> None:
        """Page-lock all that is known of a slab at once: one by one, every lock would have to be made anew to grow."""
        for number, record in self._known.items():
            if number not in self._views and record.place.segment == segment:
                self._views[number] = self.map(record.array)
        self._device.lock([self._views[n] for n, record in self._known.items() if record.place.segment == segment])

    def rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's value; ``rows`` is int64 of any shape, within the variable."""
        array = self.place(number).array
        return self._lifeline.segment_of(array).rows(array, rows)

    def gradients(self, numbers: tuple[int, ...], buffers: int) -> list[np.ndarray]:
        """The places of several variables in a set of gradient buffers, as :meth:`gradient` gives them; page-locked
        for a GPU."""
        key = (numbers, buffers)
        places = self._gradients_of.get(key)
        if places is None:
            is_new = any((number, buffers) not in self._gradients for number in numbers)
            places = [self.gradient(number, buffers) for number in numbers]
            if is_new and not self.carries:
                self._device.lock(places)
            if len(self._gradients_of) >= _SETS_KEPT:
                self._gradients_of.clear()
            self._gradients_of[key] = places
        return places

    def gradient_spans(self, numbers: tuple[int, ...], buffers: int) -> list[np.ndarray]:
        """1-D arrays that hold the gradients of several variables in a set of buffers: one for all that lie side by
        side, with what lies between them. That is zeros, unless a variable was freed there."""
        places = self.gradients(numbers, buffers)
        bounds: dict[tuple[Mapping, str], list[tuple[int, int]]] = {}
        for number, place in zip(numbers, places, strict=True):
            record = self.place(number)
            _, segment = self._gradient(record, buffers)
            if isinstance(segment, RemoteSegment):
                return [place.reshape(-1) for place in places]
            ends = record.place.offset, record.place.offset + place.nbytes
            bounds.setdefault((segment, record.spec.dtype), []).append(ends)
        spans = []
        for (segment, dtype), each in bounds.items():
            joined: list[tuple[int, int]] = []
            for first, last in sorted(each):
                if joined and first - joined[-1][1] < _ALIGNMENT:
                    first, _ = joined.pop()
                joined.append((first, last))
            whole = segment.elements("uint8")
            spans += [whole[first:last].view(dtype) for first, last in joined]
        return spans

    def gradient(self, number: int, buffers: int) -> np.ndarray:
        """The variable's place in one of this replica's two sets of gradient buffers: writable, always the same object.

        Raises InvalidArgumentError where the variable has none, MemoryPlanError where there is no room for it.
        """
        view = self._gradients.get((number, buffers))
        if view is None:
            record = self.place(number)
            if np.dtype(record.spec.dtype).kind not in "fc":
                raise InvalidArgumentError(
                    f"variable {record.spec.name} is {record.spec.dtype}; only floating-point variables have gradients"
                )
            if record.spec.sparse:
                raise dense_refused(record.spec.name)
            if buffers:
                self._use_second_gradients(record)
            array, segment = self._gradient(record, buffers)
            if isinstance(segment, RemoteSegment):
                view = aligned(record.spec.dtype, record.spec.shape)
            else:
                segment.reserve(record.place.offset, record.place.offset + array.nbytes)
                view = segment.view(array)
            self._gradients[number, buffers] = view
        return view

    def _use_second_gradients(self, record: messages.Variable) -> None:
        """Have the server make the second set of gradient buffers of the variable's dtype. Raises MemoryPlanError if it
        does not fit."""
        if record.spec.dtype not in self._second_gradients:
            request = self._conversation.session.next_request()
            self.ask(messages.Locate(request, (record.number,), 1), request, messages.Located)
            self._second_gradients.add(record.spec.dtype)

    def deliver(self, numbers: Iterable[int], buffers: int) -> None:
        """Send the server these variables' gradients in a set of buffers, if it does not map this memory.

        Raises MemoryPlanError where there is no room for them.
        """
        if self.carries:
            self._device.settle()
        for number in numbers if self.carries else ():
            array, segment = self._gradient(self.place(number), buffers)
            if isinstance(segment, RemoteSegment):
                segment.write(array, self._gradients[number, buffers])

    def _gradient(self, record: messages.Variable, buffers: int) -> tuple[Array, Mapping | RemoteSegment]:
        segment = segment_names.gradients(self._replica, buffers, record.spec.dtype)
        array = Array(record.spec.dtype, record.spec.shape, Location(segment, record.place.offset))
        return array, self._lifeline.segment_of(array)

    def map(self, array: Array) -> np.ndarray:
        """The array where it lies, in a segment or in a frame; a copy only where the segment cannot be mapped."""
        if isinstance(array.place, Location):
            self.written.restore_array(array)
            return self._lifeline.segment_of(array).view(array)
        return frame_view(array)

    def copy(self, array: Array) -> np.ndarray:
        """A copy of the array in this process's memory, which nobody else changes."""
        return np.array(self.map(array))

    def ask(self, request: Record, number: int, answer: type[R]) -> R:
        """Send a request to the server and wait for its answer. Raises what the server refuses it with."""

        self._conversation.link.send_server(request)
        return self._conversation.wait(_answer_to(request), self._claim(number, answer), question=request)

    def carry(self, request: Callable[[int], Record], answer: type[R]) -> R:
        """The :class:`cs_runtime.shared_memory.remote_segment.Carry` of this worker."""
        number = self._conversation.session.next_request()
        self._conversation.link.send_server(asked := request(number))
        return self._conversation.wait_for_bytes(_answer_to(asked), self._claim(number, answer), asked)

    def _claim(self, number: int, answer: type[R]) -> Callable[[Record], R | None]:
        def wanted(record: Record) -> R | None:
            if isinstance(record, messages.Refused) and record.number == number:
                raise to_exception(record.error, self.copy, self.resolve)
            if isinstance(record, answer) and getattr(record, "sequence", getattr(record, "request", None)) == number:
                return record
            return None

        return wanted


class Copies:
    """Copies of variables that are not mapped here. Each is the value until this replica next waits."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        #: The last ones by number, some of which may be values no more.
        self.made: dict[int, np.ndarray] = {}
        self._made_at = 0

    def __bool__(self) -> bool:
        """Whether there is one that still is a value."""
        return bool(self.made) and self._made_at == self._conversation.session.waits

    def get(self, number: int) -> np.ndarray | None:
        """The copy of a variable; None if there is none."""
        return self.made.get(number) if self else None

    def keep(self, number: int, copy: np.ndarray) -> None:
        """Keep a copy of the present value."""
        if not self:
            self.made.clear()
            self._made_at = self._conversation.session.waits
        self.made[number] = copy

    def forget(self, number: int) -> None:
        """The variable is freed."""
        self.made.pop(number, None)


def _base(view: np.ndarray) -> np.ndarray:
    """The array that holds the memory: NumPy makes every view refer to it."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def overlay(
    own: np.ndarray, note: messages.WriteNote, look: Callable[[Array], np.ndarray], named: np.ndarray | None = None
) -> None:
    """Do to ``own``, a copy of a variable, what the server will do to the variable: to all of it, or to the rows
    ``named`` (ascending), which are all that ``own`` has. ``look`` is :meth:`Catalogue.map`."""
    value, rows = look(note.value), None if note.indices is None else look(note.indices)
    if named is not None and rows is None:
        value = value[named]
    elif named is not None and rows is not None and named.size:
        places = np.minimum(np.searchsorted(named, rows), len(named) - 1)
        rows = np.where(named[places] == rows, places, -1)  # others are left out
    write(own, note.op, value, rows)


def _answer_to(request: Record) -> str:
    return f"the server's answer to {type(request).__name__}"
