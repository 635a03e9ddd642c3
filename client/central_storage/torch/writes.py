"""In-place writes to parameters: which one, and in which line of the user's program.

torch counts the writes to a tensor, so the parameter is known. The line is found by calling the function once more, on
its own, under a mode that sees every operation before it is carried out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from central_storage.core.context import replica_here
from central_storage.diagnostics.callers import is_ours, root_package
from cs_proto.errors import VariableWrittenError

from .share import here

__all__ = ["raise_written"]


def raise_written(binding: Any, written: Sequence[Any]) -> None:
    """Raise VariableWrittenError for these parameters, and see the server's values again."""
    names = ", ".join(p.variable.name for p in written)
    _restore(written)
    line = _line_of(binding, written)
    _restore(binding.parameters)
    where = f" in {line}" if line else ""
    raise VariableWrittenError(
        f"{names} was written in place{where}. Parameters are the server's memory, and its optimizers change them; this "
        "step has changed nothing. To change a value, use parameter.variable.assign in the script; to compute with a "
        "changed copy, use parameter.clone()"
    )


def _restore(parameters: Sequence[Any]) -> None:
    backend = replica_here()
    assert backend is not None
    backend.restore([p.variable.number for p in parameters])


def _line_of(binding: Any, written: Sequence[Any]) -> str:
    """The line that writes to one of the parameters; empty if it does not show."""
    share, here.share, here.is_repeating = here.share, None, True
    try:
        with _Finder(written):
            binding.repeat()
    except _Found as found:
        return str(found)
    except Exception:  # noqa: BLE001  (the function may fail where its writes are not repeated)
        return ""
    finally:
        here.share, here.is_repeating = share, False
    return ""


class _Found(BaseException):
    """The line that was looked for; no handler of the function catches it."""


class _Finder(TorchDispatchMode):  # type: ignore[misc]
    """Raises :class:`_Found` before an operation writes to the memory of one of the parameters."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__()
        self._memory = {p.untyped_storage().data_ptr() for p in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written_by(func, args, kwargs):
            if written.layout is torch.strided and written.untyped_storage().data_ptr() in self._memory:
                raise _Found(_line_of_user())
        return func(*args, **kwargs)


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def _line_of_user() -> str:
    """``file:line`` of the nearest caller that belongs neither to this project nor to torch."""
    frame = sys._getframe(1)  # noqa: SLF001  (the one way to a caller without building a whole stack)
    while frame.f_back is not None and (is_ours(frame) or root_package(frame) == "torch"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
