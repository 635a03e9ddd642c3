"""The plan: how many bytes a service takes for these variables, optimizers and replicas, by kind and by process.

Pure: numbers go in, a :class:`Plan` comes out. ``cs-ctl estimate`` and the line that a training prints at its first
step use it. The arithmetic of a single variable is the server's (``cs_proto.memory_plan``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cs_proto import memory_plan
from cs_proto.frozen import frozen
from cs_proto.messages import VariableSpec
from cs_proto.sizes import rounded

__all__ = ["KINDS", "Optimizer", "Plan", "planned"]

#: The kinds of memory, as ``cs-ctl status`` tells them apart.
KINDS = ("parameters", "slots", "gradients", "arenas", "other")

# What the server writes down about itself, each replica and each variable: about so much, which matters only beside
# very small models. A test compares it with a training.
_SERVICE_NBYTES = 64 << 10
_REPLICA_NBYTES = 44 << 10
_VARIABLE_NBYTES = 512


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


def planned(
    variables: Mapping[int, VariableSpec],
    optimizers: Sequence[Optimizer],
    devices: Sequence[str],
    parameter_device: str,
    *,
    arenas: int = 0,
) -> Plan:
    """The plan for these variables (by number) and optimizers, with a replica on each of ``devices`` (short form).

    ``arenas`` are the bytes of the arguments of the steps under way. A variable is updated by the optimizers that name
    it, else by one of those that name none: by that with the largest slots.

    Examples:
        >>> specs = {1: VariableSpec("w", "float32", (1000,), True, 0, 0)}
        >>> plan = planned(specs, [Optimizer("adam")], ["cpu:0", "cpu:1"], "cpu:0")
        >>> plan.by_kind
        {'parameters': 4032, 'slots': 8064, 'gradients': 8064, 'arenas': 0, 'other': 156160}
    """
    parameters = slots = gradients = sparse = journal = on_gpu = 0
    # Replicas on the GPU of the variables have their gradients there, too.
    beside = sum(parameter_device in device.split("+") for device in devices)
    is_upper_bound = False
    for number, spec in variables.items():
        # Slots and gradients lie at the offsets of the variables, so they have the same gaps.
        nbytes = memory_plan.value_nbytes(spec)
        room = memory_plan.room_of(nbytes)
        most, least = _slots_of(number, spec, optimizers)
        is_upper_bound |= most != least
        parameters += room
        slots += most
        gradient = memory_plan.room_of(memory_plan.gradient_nbytes(spec, nbytes))
        gradients += gradient
        sparse += room + most if spec.sparse else 0
        journal += memory_plan.on_device(parameter_device, spec.dtype, room + most)
        on_gpu += memory_plan.on_device(parameter_device, spec.dtype, room + most + beside * gradient)
    # The changes of variables on a GPU go through a journal that has room for all of them.
    other = _SERVICE_NBYTES + len(devices) * _REPLICA_NBYTES + len(variables) * _VARIABLE_NBYTES + journal
    return Plan(
        tuple(devices),
        parameter_device,
        len(variables),
        parameters,
        slots,
        gradients,
        arenas,
        other,
        sparse,
        on_gpu,
        is_upper_bound,
    )


def _slots_of(number: int, spec: VariableSpec, optimizers: Collection[Optimizer]) -> tuple[int, int]:
    """The most and the least bytes of slots beside a variable."""
    if not spec.trainable or spec.dtype[0] not in "fc":
        return 0, 0
    named = [each for each in optimizers if each.members is not None and number in each.members]
    if named:
        total = sum(memory_plan.slot_nbytes(each.rule, spec) for each in named)
        return total, total
    possible = [memory_plan.slot_nbytes(each.rule, spec) for each in optimizers if each.members is None]
    return max(possible, default=0), min(possible, default=0)
