"""Every error of the project, in one tree, and the closed table that takes exceptions across processes.

    CentralStorageError
    ├── DeviceError              (ValueError)    a device that does not exist; lists those that do
    ├── InvalidArgumentError     (ValueError)    a shape, dtype, axis or value that does not fit
    │   ├── NotATensorError      (AttributeError)  a Python value was given where replicas combine arrays
    │   └── UnbatchedDatasetError (IndexError)   a data set of scalars is to be split over the replicas
    ├── NotADatasetError         (TypeError, AttributeError)  an object that is not a data set was given as one
    ├── ContextError             (RuntimeError)  a call in the wrong context: replica, cross-replica, another strategy
    │   ├── UsedScopeError       (AttributeError)  a scope is entered again after it was left
    │   └── DatasetContextError  (ValueError)    a data set is distributed, or a distributed one read, in a replica
    ├── ShippingError            (TypeError)     a function or argument that cannot be sent to a replica
    ├── ResultError              (TypeError)     a replica's result outside the closed vocabulary
    ├── MemoryPlanError          (MemoryError)   planned bytes exceed available bytes; nothing was touched
    ├── DeviceMemoryError        (MemoryError)   a device has no room for an array; names it, what is free and the plan
    ├── DescriptorLimitError     (OSError)       a process cannot open more files or connections; says how many are open
    ├── OutOfRangeError          (IndexError)    a data set iterator is exhausted
    │   └── EndOfIterationError  (StopIteration)   the same, of next(iterator)
    ├── MergeMismatchError       (RuntimeError)  replicas disagree about what comes next
    │   └── StructureMismatchError (AssertionError)  they combine nests of different structure
    ├── ReplicaLostError         (RuntimeError)  a process died during a run; says which updates stand
    ├── VariableWrittenError     (RuntimeError)  something wrote in place to a variable; names it and since when
    ├── NumericsError            (FloatingPointError)  a gradient is not finite; names variable, index, step, replica
    ├── ShutdownError            (RuntimeError)  the strategy was shut down, or its service ended
    ├── NoAnswerError            (TimeoutError)  a service did not answer an observer in time
    ├── CheckpointError          (ValueError)    a checkpoint that cannot be read or does not fit; names the entry
    │   ├── CheckpointDamagedError                a damaged, incomplete or renamed file
    │   └── CheckpointMismatchError (AssertionError)  the checkpoint and the objects hold different variables
    ├── CheckpointSaveError      (OSError)       a checkpoint that could not be written; names its path, need and have
    ├── LaunchError              (RuntimeError)  a service could not be started; carries the child's last lines
    ├── ConfigurationError       (ValueError)    an invalid option, environment variable or command line
    ├── ProtocolError
    │   ├── LocalProtocolError   (ValueError)    this process tried to send an illegal message
    │   └── PeerProtocolError    (ValueError)    the peer sent one; it is dropped and changes nothing else
    ├── Fenced                   (RuntimeError)  a message of an incarnation that has been replaced
    └── ReplicaError             (Exception)     an exception of the user's function, raised again in the client;
                                                 always also an instance of the original built-in type

An exception never travels as an object. It travels as a code of the table below, with its arguments as data and its
traceback as text; :func:`replica_exception_class` gives the class that is raised at the other end.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping

__all__ = [
    "CODES",
    "CentralStorageError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointSaveError",
    "ConfigurationError",
    "ContextError",
    "DatasetContextError",
    "DescriptorLimitError",
    "DeviceError",
    "DeviceMemoryError",
    "EndOfIterationError",
    "Fenced",
    "InvalidArgumentError",
    "LaunchError",
    "LocalProtocolError",
    "MemoryPlanError",
    "MergeMismatchError",
    "NoAnswerError",
    "NotADatasetError",
    "NotATensorError",
    "NumericsError",
    "OutOfRangeError",
    "PeerProtocolError",
    "ProtocolError",
    "ReplicaError",
    "ReplicaLostError",
    "ResultError",
    "ShippingError",
    "ShutdownError",
    "StructureMismatchError",
    "UnbatchedDatasetError",
    "UsedScopeError",
    "VariableWrittenError",
    "code_of",
    "replica_exception_class",
]


class CentralStorageError(Exception):
    """The root of every error this project raises of its own."""


class DeviceError(CentralStorageError, ValueError):
    """A device string that is malformed or names a device this machine does not have."""


class InvalidArgumentError(CentralStorageError, ValueError):
    """A shape, dtype, axis or value that does not fit the operation."""


class NotATensorError(InvalidArgumentError, AttributeError):
    """A Python value was given where replicas combine arrays."""


class UnbatchedDatasetError(InvalidArgumentError, IndexError):
    """A scalar was given in place of a batch, and cannot be split over the replicas."""


class NotADatasetError(CentralStorageError, TypeError, AttributeError):
    """An object that is not a data set was given as one; the message says how to make a data set of it."""


class ContextError(CentralStorageError, RuntimeError):
    """A call made in the wrong context: inside a replica, outside one, or under another strategy."""


class UsedScopeError(ContextError, AttributeError):
    """A manager that ``scope()`` returned was entered again after it was left."""


class DatasetContextError(ContextError, ValueError):
    """A data set was distributed, or a distributed one was read, inside a replica function. Do that in the script and
    pass elements to ``run``."""


class ShippingError(CentralStorageError, TypeError):
    """A function or argument that cannot be sent to a replica; names the object and the remedy."""


class ResultError(CentralStorageError, TypeError):
    """A result of a replica that does not belong to the closed vocabulary of data."""


class MemoryPlanError(CentralStorageError, MemoryError):
    """The planned bytes do not fit the available bytes. Nothing was allocated."""


class DeviceMemoryError(CentralStorageError, MemoryError):
    """A device has no room for an array. Its contents are unchanged."""


class DescriptorLimitError(CentralStorageError, OSError):
    """A process, this one or one of the service, has no descriptors left for another connection. Nothing was opened."""


class OutOfRangeError(CentralStorageError, IndexError):
    """The iterator of a data set is exhausted."""


class EndOfIterationError(OutOfRangeError, StopIteration):
    """As :class:`OutOfRangeError`, from ``next``, where ``for`` expects a StopIteration.

    ``get_next`` raises the base class: inside a generator Python turns every StopIteration into a RuntimeError.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # What `yield from` gives. IndexError's constructor does not pass on to StopIteration's, which would set it, and
        # Python 3.11 crashes where nothing has.
        self.value = None


class MergeMismatchError(CentralStorageError, RuntimeError):
    """Replicas of one run disagree about the next merge point, or one returned while others wait."""


class StructureMismatchError(MergeMismatchError, AssertionError):
    """Replicas of one run combine nests of different structure."""


class ReplicaLostError(CentralStorageError, RuntimeError):
    """A worker or the server died during a run. The message says which updates are kept."""


class VariableWrittenError(CentralStorageError, RuntimeError):
    """A replica function, or native code that it called, wrote in place to memory in which it reads a variable. The
    write changed no other process and has been undone. The message names the variable, says since which run numbers
    may be wrong, and gives the remedy."""


class NumericsError(CentralStorageError, FloatingPointError):
    """A gradient has a number that is not finite, or so large that the sum over the replicas may overflow, and the
    strategy checks for that. The message names the variable, the first index, the value, the step and the replica.
    Nothing of the apply was done, and the next run works."""


class ShutdownError(CentralStorageError, RuntimeError):
    """The strategy was shut down, or its service has ended."""


class NoAnswerError(CentralStorageError, TimeoutError):
    """A service did not answer an observer's question in time."""


class CheckpointError(CentralStorageError, ValueError):
    """A checkpoint does not exist, cannot be read, or does not fit the objects. Nothing was restored."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint's file is damaged, incomplete or renamed."""


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint holds values that no object uses, or lacks values that objects need; names both."""


class CheckpointSaveError(CentralStorageError, OSError):
    """A checkpoint was not saved, because the file system refuses. Existing checkpoints stay, and no draft is left.

    ``errno`` is that of the file system, and ``filename`` the path. ``needed_nbytes`` is the size of the checkpoint,
    and ``free_nbytes`` what the file system has for this user; None if it does not say.
    """

    def __init__(self, *args: object, needed_nbytes: int | None = None, free_nbytes: int | None = None) -> None:
        super().__init__(*args)
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes


class LaunchError(CentralStorageError, RuntimeError):
    """A service could not be started. The message carries the failing child's last lines."""


class ConfigurationError(CentralStorageError, ValueError):
    """An option, environment variable or command line is invalid."""


class ProtocolError(CentralStorageError):
    """An illegal message."""


class LocalProtocolError(ProtocolError, ValueError):
    """This process tried to build or send an illegal message: a bug on this side."""


class PeerProtocolError(ProtocolError, ValueError):
    """The peer sent an illegal message, which is refused or dropped without any other effect."""


class Fenced(CentralStorageError, RuntimeError):
    """A message of an incarnation that has been replaced; it was not acted on."""


class ReplicaError(CentralStorageError):
    """An exception raised by the user's function in a replica.

    The client always raises a subclass that also derives from the original built-in type, so ``except KeyError``
    catches a KeyError of a replica. ``replica`` is the replica it came from (-1 where it is
    not of one replica), ``merge_index`` the number of merge points that replica had passed; the remote traceback
    is the exception's note.
    """

    replica: int = -1
    merge_index: int = 0


_BUILT_IN = [
    "ArithmeticError",
    "AssertionError",
    "AttributeError",
    "BlockingIOError",
    "BrokenPipeError",
    "BufferError",
    "ChildProcessError",
    "ConnectionAbortedError",
    "ConnectionError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "EOFError",
    "Exception",
    "FileExistsError",
    "FileNotFoundError",
    "FloatingPointError",
    "GeneratorExit",
    "ImportError",
    "IndentationError",
    "IndexError",
    "InterruptedError",
    "IsADirectoryError",
    "KeyError",
    "KeyboardInterrupt",
    "LookupError",
    "MemoryError",
    "ModuleNotFoundError",
    "NameError",
    "NotADirectoryError",
    "NotImplementedError",
    "OSError",
    "OverflowError",
    "PermissionError",
    "ProcessLookupError",
    "RecursionError",
    "ReferenceError",
    "RuntimeError",
    "StopAsyncIteration",
    "StopIteration",
    "SyntaxError",
    "SystemError",
    "SystemExit",
    "TabError",
    "TimeoutError",
    "TypeError",
    "UnboundLocalError",
    "UnicodeDecodeError",
    "UnicodeEncodeError",
    "UnicodeError",
    "UnicodeTranslateError",
    "ValueError",
    "Warning",
    "DeprecationWarning",
    "FutureWarning",
    "RuntimeWarning",
    "UserWarning",
    "ZeroDivisionError",
]

_OURS = (
    CentralStorageError,
    DeviceError,
    InvalidArgumentError,
    NotATensorError,
    UnbatchedDatasetError,
    NotADatasetError,
    ContextError,
    UsedScopeError,
    DatasetContextError,
    ShippingError,
    ResultError,
    MemoryPlanError,
    DeviceMemoryError,
    DescriptorLimitError,
    OutOfRangeError,
    EndOfIterationError,
    MergeMismatchError,
    StructureMismatchError,
    ReplicaLostError,
    VariableWrittenError,
    NumericsError,
    ShutdownError,
    NoAnswerError,
    CheckpointError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointSaveError,
    LaunchError,
    ConfigurationError,
    LocalProtocolError,
    PeerProtocolError,
    Fenced,
)


def _replica_class(original: type[BaseException]) -> type[ReplicaError]:
    if original is Exception:
        return ReplicaError
    # ReplicaError itself derives from Exception, so `except Exception` also catches a replica's SystemExit.
    return type(
        f"Replica{original.__name__}",
        (ReplicaError, original),
        {"__doc__": f"A {original.__name__} raised in a replica.", "__module__": __name__},
    )


#: The closed table: wire code -> class raised in the receiver. A built-in type comes back as a ReplicaError that is
#: also of that type; the project's own types come back unchanged.
CODES: Mapping[str, type[Exception]] = {
    **{name: _replica_class(getattr(builtins, name)) for name in _BUILT_IN},
    **{f"cs.{error.__name__}": error for error in _OURS},
}


# If a process in between raises a replica's exception again, the exception keeps its code.
_CODE_OF: Mapping[type[BaseException], str] = {
    **{getattr(builtins, name): name for name in _BUILT_IN},
    **{error: code for code, error in CODES.items()},
}


def code_of(error: type[BaseException]) -> str:
    """The wire code of the nearest listed class of an error: itself, or the first listed class of its ancestry.

    Args:
        error: The class of the error.

    Raises:
        AttributeError: ``error`` is not a class.

    Examples:
        >>> code_of(KeyError)
        'KeyError'
    """
    return next((_CODE_OF[ancestor] for ancestor in error.__mro__ if ancestor in _CODE_OF), "Exception")


def replica_exception_class(code: str) -> type[Exception]:
    """The class that is raised for a wire code.

    Args:
        code: A key of :data:`CODES`.

    Raises:
        PeerProtocolError: The code is unknown.

    Examples:
        >>> issubclass(replica_exception_class("KeyError"), KeyError)
        True
    """
    try:
        return CODES[code]
    except KeyError:
        raise PeerProtocolError(f"unknown exception code {code!r}; the table has {len(CODES)} codes") from None
