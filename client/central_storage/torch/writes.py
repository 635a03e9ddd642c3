"""In-place writes to parameters: which one, and in which line of the user's program.

torch counts the writes to a tensor, so the parameter is known. The line is found by calling the function once more, on
its own, under a mode that sees every operation before it is carried out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from central_storage.core.context import replica_here
from central_storage.diagnostics.callers import is_ours, root_package

from .share import here

__all__ = ["raise_written"]


def raise_written(binding: Any, written: Sequence[Any]) -> NoReturn:
    """Raise VariableWrittenError for these parameters, and see the server's values again."""
    backend = replica_here()
    assert backend is not None
    backend.restore([p.variable.number for p in binding.parameters])
    sites = _lines_of(binding, written)
    backend.restore([p.variable.number for p in binding.parameters])
    backend.refuse_written({p.variable.number: sites.get(id(p), "") for p in written})


def _lines_of(binding: Any, written: Sequence[Any]) -> dict[int, str]:
    """By the identity of a parameter, the line that writes to it first, if the function does it again."""
    share, here.share, here.is_repeating = here.share, None, True
    finder = _Finder(written)
    try:
        with finder:
            binding.repeat_alone()
    except Exception:  # noqa: BLE001  (after a write that is not carried out, the function may fail anywhere)
        pass
    finally:
        here.share, here.is_repeating = share, False
    return finder.lines


class _Finder(TorchDispatchMode):
    """Notes the lines that write to the memory of parameters, and lets them: the pages are private."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__()
        self._owners = {p.untyped_storage().data_ptr(): id(p) for p in parameters}
        self.lines: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written_by(func, args, kwargs):
            address = written.untyped_storage().data_ptr() if written.layout is torch.strided else 0
            if address in self._owners:
                self.lines.setdefault(self._owners[address], _line_of_user())
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
