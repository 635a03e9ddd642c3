"""The plan: how many bytes a service takes for these variables, optimizers and replicas, by kind and by process.

Pure: numbers go in, a :class:`Plan` comes out. ``cs-ctl estimate`` and the line that a training prints at its first
step use it. The arithmetic of a single variable is the server's (``cs_proto.memory_plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cs_proto import memory_plan, segment_names
from cs_proto.arithmetic.optimizers import SLOTS
from cs_proto.frozen import frozen
from cs_proto.memory_plan import Pages
from cs_proto.messages import VariableSpec
from cs_proto.sizes import rounded

__all__ = ["KINDS", "Optimizer", "Plan", "planned"]

#: The kinds of memory, as ``cs-ctl status`` tells them apart.
KINDS = ("parameters", "slots", "gradients", "arenas", "other")


@frozen
class Optimizer:
    """An optimizer: its rule, and the numbers of the variables that it updates; None if only a step says which."""

    rule: str
    members: frozenset[int] | None = None


@frozen
class Plan:
    """Bytes of a service. ``gradients`` is what each replica needs."""

    devices: tuple[str, ...]
    parameter_device: str
    variables: int
    parameters: int
    slots: int
    gradients: int
    arenas: int
    other: int
    #: The part of parameters and slots that a table with ``sparse=True`` takes only where rows are used.
    sparse: int
    #: What lies on the GPU of the variables; 0 if they lie on none.
    on_gpu: int
    #: Whether a step decides which optimizer updates which variable, and that changes the bytes.
    is_upper_bound: bool
    #: The parameters that are no table: a worker on another machine has a copy of them.
    mirrored: int

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes of the machine's memory by kind, in the order of :data:`KINDS`."""
        return {
            "parameters": self.parameters,
            "slots": self.slots,
            "gradients": self.replicas * self.gradients,
            "arenas": self.arenas,
            "other": self.other,
        }

    @property
    def by_process(self) -> dict[str, dict[str, int]]:
        """The bytes by the process that fills them, and by kind. All processes map the same memory, so each byte counts
        once."""
        none = dict.fromkeys(KINDS, 0)
        server = {**none, "parameters": self.parameters, "slots": self.slots, "other": self.other}
        workers = {f"w{replica}": {**none, "gradients": self.gradients} for replica in range(self.replicas)}
        return {"server": server, **workers, "script": {**none, "arenas": self.arenas}}

    @property
    def nbytes(self) -> int:
        """All bytes in the machine's memory."""
        return sum(self.by_kind.values())

    def described(self) -> str:
        """The kinds that a training takes most of, in words."""
        return (
            f"parameters {rounded(self.parameters)}, slots {rounded(self.slots)}, gradients {self.replicas} x "
            f"{rounded(self.gradients)}"
        )


class _Layout:
    """Segments as the server lays them out: those beside a slab have the offsets of its variables."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, object], Pages] = {}
        self._tails: dict[str, int] = {}
        #: The most that a lane of a commit keeps of old values, and the pieces in which it does.
        self.kept = self.pieces = 0

    def add(self, spec: VariableSpec, rules: Mapping[int, str]) -> int:
        """Lay a variable out, its gradients, and the slots that the optimizers with these rules (by number) have beside
        it; the bytes of the slots."""
        nbytes = memory_plan.value_nbytes(spec)
        slab = segment_names.slab(spec.dtype, sparse=spec.sparse)
        offset = self._tails.get(slab, 0)
        self._tails[slab] = offset + memory_plan.room_of(nbytes)
        of = "sparse " if spec.sparse else ""
        self._take(f"{of}parameters", slab, offset, nbytes)
        self._take("gradients", slab, offset, memory_plan.gradient_nbytes(spec, nbytes))
        total = 0
        for optimizer, rule in rules.items():
            slots, own = SLOTS[rule], memory_plan.slot_nbytes(rule, spec)
            for slot in slots:
                self._take(f"{of}slots", (optimizer, slot, slab), offset, own // len(slots))
            if spec.sparse or rule in memory_plan.BY_NORM:
                self.kept = max(self.kept, (1 + len(slots)) * min(memory_plan.KEPT_NBYTES, nbytes))
                self.pieces += -(-nbytes // memory_plan.KEPT_NBYTES)
            total += own
        return total

    def _take(self, kind: str, segment: object, offset: int, nbytes: int) -> None:
        self._segments.setdefault((kind, segment), Pages()).take(offset, offset + nbytes)

    def nbytes(self, *kinds: str) -> int:
        """Bytes of the pages of all segments of these kinds."""
        return sum(pages.nbytes for (kind, _), pages in self._segments.items() if kind in kinds)


def planned(
    variables: Mapping[int, VariableSpec],
    optimizers: Sequence[Optimizer],
    devices: Sequence[str],
    parameter_device: str,
    *,
    arenas: int = 0,
    lanes: int = 1,
) -> Plan:
    """The plan for these variables (by number) and optimizers, with a replica on each of ``devices`` (short form).

    ``arenas`` are the bytes of the arguments of the steps under way; ``lanes`` is the number of cores of the server. A
    variable is updated by the optimizers that name it, else by one of those that name none: by that with the largest
    slots.

    Examples:
        >>> specs = {1: VariableSpec("w", "float32", (1000,), True, 0, 0)}
        >>> plan = planned(specs, [Optimizer("adam")], ["cpu:0", "cpu:1"], "cpu:0")
        >>> plan.by_kind
        {'parameters': 4096, 'slots': 8192, 'gradients': 8192, 'arenas': 0, 'other': 192512}
    """
    layout = _Layout()
    on_gpu = journal = 0
    # Replicas on the GPU of the variables have their gradients there, too.
    beside = sum(parameter_device in device.split("+") for device in devices)
    is_upper_bound = False
    for number, spec in variables.items():
        updating, is_ambiguous = _updating(number, spec, optimizers)
        is_upper_bound |= is_ambiguous
        slots = layout.add(spec, {which: optimizers[which].rule for which in updating})
        nbytes = memory_plan.value_nbytes(spec)
        own = memory_plan.room_of(nbytes) + slots
        gradient = memory_plan.room_of(memory_plan.gradient_nbytes(spec, nbytes))
        journal += memory_plan.on_device(parameter_device, spec.dtype, own)
        on_gpu += memory_plan.on_device(parameter_device, spec.dtype, own + beside * gradient)
    # The changes of variables on a GPU go through a journal that has room for all of them.
    undo = journal or memory_plan.undo_nbytes(lanes, layout.kept, layout.pieces)
    return Plan(
        tuple(devices),
        parameter_device,
        len(variables),
        layout.nbytes("parameters", "sparse parameters"),
        layout.nbytes("slots", "sparse slots"),
        layout.nbytes("gradients"),
        arenas,
        memory_plan.service_nbytes(len(devices), variables.values()) + undo,
        layout.nbytes("sparse parameters", "sparse slots"),
        on_gpu,
        is_upper_bound,
        layout.nbytes("parameters"),
    )


def _updating(number: int, spec: VariableSpec, optimizers: Sequence[Optimizer]) -> tuple[list[int], bool]:
    """Which optimizers have slots beside a variable, by their places, and whether another choice has other slots."""
    if not spec.trainable or spec.dtype[0] not in "fc":
        return [], False
    members = [each.members for each in optimizers]
    if named := [which for which, own in enumerate(members) if own is not None and number in own]:
        return named, False
    possible = [which for which, own in enumerate(members) if own is None]
    nbytes = {which: memory_plan.slot_nbytes(optimizers[which].rule, spec) for which in possible}
    if not nbytes:
        return [], False
    return [max(possible, key=nbytes.__getitem__)], len(set(nbytes.values())) > 1
