"""Names of the segments: shared memory that the supervisor makes and the server lays out.

:class:`cs_runtime.mapping.Mapping` maps one.
"""

from __future__ import annotations

__all__ = [
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
    "parameters",
    "server_arena",
    "slots",
    "versions",
]

#: The engine's tables, from which it can be rebuilt.
CONTROL = "control"
#: They begin behind this many bytes. The first eight count writes to variables: an odd number while one is under way.
#: The next eight count what may give a variable's place to another.
CONTROL_HEADER_NBYTES = 4096
#: What a commit changes, where variables lie on a GPU.
JOURNAL = "journal"

#: How far a commit is, and what it is overwriting.
UNDO = "undo"


def parameters(dtype: str) -> str:
    """The slab of all variables of one dtype."""
    return f"parameters/{dtype.lower()}"


def is_parameters(name: str) -> bool:
    """Whether the segment called ``name`` holds the variables of a dtype."""
    return name.startswith("parameters/")


def slots(optimizer: int, slot: str, dtype: str) -> str:
    """One slot kind of one optimizer, at the same offsets as the slab of ``dtype``."""
    return f"slots/{optimizer}/{slot.lower()}/{dtype.lower()}"


def gradients(replica: int, buffers: int, dtype: str) -> str:
    """One of the two sets of dense gradient buffers of a replica (0 and 1), at the same offsets as the slab of
    ``dtype``; or of those that it has, on the GPU of the variables, beside them (2 and 3), which is no segment."""
    return f"gradients/{replica}/{buffers}/{dtype.lower()}"


def is_device_gradients(name: str) -> bool:
    """Whether this is a set of gradient buffers on a GPU."""
    kind, *rest = name.split("/")
    return kind == "gradients" and int(rest[1]) >= 2


def device_gradients(name: str) -> str:
    """The set of gradient buffers on the GPU beside the set in a segment of that name, or itself."""
    return _gradients_of(name, 2)


def host_gradients(name: str) -> str:
    """The set of gradient buffers in a segment beside the set on the GPU of that name, or itself."""
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
    """The controller's own memory for batches that are brought ahead of their run."""
    return "inputs"


def versions() -> str:
    """A uint64 for each variable, at its number, that changes with every commit that changes the variable, and at 0 one
    that changes with every start of the server. Not the version that records tell."""
    return "versions"
