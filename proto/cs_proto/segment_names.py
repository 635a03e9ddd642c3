"""Names of the segments: shared memory that the supervisor makes and the server lays out.

:class:`cs_runtime.shared_memory.mapping.Mapping` maps one.
"""

from __future__ import annotations

__all__ = [
    "ACCOUNT",
    "CONTROL",
    "CONTROL_HEADER_NBYTES",
    "JOURNAL",
    "UNDO",
    "arena",
    "controller_arena",
    "device_gradients",
    "gradients",
    "host_gradients",
    "inputs",
    "is_device_gradients",
    "is_parameters",
    "is_sparse",
    "is_times",
    "parameters",
    "server_arena",
    "slab",
    "slots",
    "times",
    "versions",
]

#: The engine's tables, from which it can be rebuilt.
CONTROL = "control"
#: The tables begin after this many bytes. The first eight are the counter of writes to variables, which is odd while a
#: write is under way. The next eight count the changes that may give a variable's place to another variable.
CONTROL_HEADER_NBYTES = 4096
#: The changes of a commit, if variables lie on a GPU.
JOURNAL = "journal"

#: The progress of a commit, and the values that it is overwriting.
UNDO = "undo"

#: What workers returned in the steps that the server has carried out by a program.
ACCOUNT = "account"


def slab(dtype: str, *, sparse: bool) -> str:
    """The name of the slab of the variables of one dtype. Sparse ones have a slab of their own, because no gradient
    buffers belong to it."""
    return f"sparse/{dtype}" if sparse else dtype


def parameters(slab: str) -> str:
    """All variables of a slab."""
    return f"parameters/{slab.lower()}"


def is_parameters(name: str) -> bool:
    """Whether the segment called ``name`` holds the variables of a slab."""
    return name.startswith("parameters/")


def is_sparse(name: str) -> bool:
    """Whether the segment called ``name`` holds a slab of sparse variables, or slots of them."""
    kind, *rest = name.split("/")
    return (kind, rest[:1]) == ("parameters", ["sparse"]) or (kind, rest[2:3]) == ("slots", ["sparse"])


def slots(optimizer: int, slot: str, slab: str) -> str:
    """One slot kind of one optimizer, at the same offsets as the variables of the slab."""
    return f"slots/{optimizer}/{slot.lower()}/{slab.lower()}"


def gradients(replica: int, buffers: int, dtype: str) -> str:
    """A set of dense gradient buffers of a replica, at the same offsets as the slab of ``dtype``.

    Sets 0 and 1 are segments. Sets 2 and 3 are their counterparts on the GPU of the variables, and no segments.
    """
    return f"gradients/{replica}/{buffers}/{dtype.lower()}"


def is_device_gradients(name: str) -> bool:
    """Whether this is a set of gradient buffers on a GPU."""
    kind, *rest = name.split("/")
    return kind == "gradients" and int(rest[1]) >= 2


def device_gradients(name: str) -> str:
    """The set on the GPU that corresponds to the set in the segment ``name``; a set on the GPU is returned as it is."""
    return _gradients_of(name, 2)


def host_gradients(name: str) -> str:
    """The set in a segment that corresponds to the set ``name`` on the GPU; a set in a segment is returned as it is."""
    return _gradients_of(name, 0)


def _gradients_of(name: str, first: int) -> str:
    kind, replica, buffers, dtype = name.split("/")
    return f"{kind}/{replica}/{first + int(buffers) % 2}/{dtype}"


def arena(replica: int) -> str:
    """A replica's own memory for arguments and results that are too large for a frame."""
    return f"arena/{replica}"


def server_arena() -> str:
    """The server's own memory for results of all_reduce and all_gather that are too large for a frame."""
    return "arena/server"


def controller_arena() -> str:
    """The controller's own memory for batches and initial values."""
    return "arena/controller"


def inputs() -> str:
    """The controller's own memory for batches that are read ahead of their run."""
    return "inputs"


def versions() -> str:
    """A uint64 for each variable, at its number, that changes with every commit that changes the variable.

    The one at 0 changes with every start of the server. They are not the versions in records.
    """
    return "versions"


def times(process: str) -> str:
    """The step times of a process, ``server``, ``w0``, ``w1``, ... or ``controller``, as
    :mod:`cs_proto.step_times` describes them."""
    return f"times/{process}"


def is_times(name: str) -> bool:
    """Whether the segment called ``name`` holds step times."""
    return name.startswith("times/")
