"""Buffers of a module, such as BatchNorm's statistics, as variables of the server.

Buffers of one dtype lie next to each other in one variable, because a variable of its own for each would cost more than
most of them are worth. Each step begins with the central values. After it, one of three rules says what the central
values become: those of the first replica, as DistributedDataParallel has it, the mean over all rows, or, for each
replica, its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from central_storage.core.values import IndexedSlices
from central_storage.variables.variable import Variable
from cs_proto.errors import InvalidArgumentError

from .parameters import empty_like, stored_dtype, value_of, write_to
from .share import Share

__all__ = ["RULES", "CentralBuffers", "buffers_of", "central_buffers", "forget_buffers"]

RULES = ("first", "mean", "local")

#: Buffers of more elements get a variable of their own: a change of a small one does not move them.
_SHARED = 1 << 14
#: The attribute of a module that has its :class:`CentralBuffers`.
_KEY = "_central_buffers"


class _Member(NamedTuple):
    """A buffer: the path of the module that has it, its name there, its place in the variable, its shape."""

    path: str
    name: str
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


class _Pack:
    """Buffers of one dtype in one variable of the shape [1, elements]; with the rule "local" [replicas, elements]."""

    def __init__(self, dtype: torch.dtype, members: list[_Member], variable: Variable) -> None:
        self.dtype = dtype
        self.members = members
        self.variable = variable
        # In a replica: the memory of all its buffers, these buffers, and the central values of this run.
        self._flat: Any = None
        self._buffers: list[Any] = []
        self._start: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_flat": None, "_buffers": [], "_start": None}

    def begin(self, root: torch.nn.Module, row: int) -> None:
        """Let the module compute with copies of the central values of a row."""
        self._start = torch.from_dlpack(self.variable)[row]
        if self._flat is None:
            self._flat = torch.empty(self._start.shape, dtype=self.dtype, device=self._start.device)
            self._buffers = [self._flat[m.first : m.first + m.size].view(m.shape) for m in self.members]
        for member, buffer in zip(self.members, self._buffers, strict=True):
            owner = root.get_submodule(member.path)
            if getattr(owner, member.name) is not buffer:
                setattr(owner, member.name, buffer)
        self._flat.copy_(self._start)

    def end(self, root: torch.nn.Module, rule: str, share: Share) -> None:
        """Note what the central values become."""
        start, self._start = self._start, None
        for member, buffer in zip(self.members, self._buffers, strict=True):
            present = getattr(root.get_submodule(member.path), member.name)
            if present is not buffer:  # the module has put another tensor in its place
                buffer.copy_(_checked(present, member, self.dtype).detach())
        before = start.to(self.dtype)
        if torch.equal(self._flat, before):
            return
        if rule == "mean" and (self.dtype.is_floating_point or self.dtype.is_complex):
            # A difference: what no step changes stays as it is, and infinity minus infinity is no number.
            change = torch.where(self._flat == before, 0, self._flat - before).to(start.dtype) * share.weight
            self.variable.scatter_add(_row(change, 0))
        elif rule == "local":
            self.variable.scatter_update(_row(self._flat.to(start.dtype), share.replica))
        elif share.replica == 0:
            self.variable.scatter_update(_row(self._flat.to(start.dtype), 0))

    def drop(self) -> None:
        """Forget the central values, without a note."""
        self._start = None


class CentralBuffers:
    """The buffers of one centralized module."""

    def __init__(self, root: torch.nn.Module, rule: str, replicas: int) -> None:
        """Make the variables, in the scope of a strategy of so many ``replicas``."""
        self.root = root
        self.rule = rule
        self._packs: list[_Pack] = []
        for dtype, found in _together(root):
            unique = {id(buffer): buffer for *_, buffer in found}  # one buffer may have several names
            firsts = dict(zip(unique, accumulate((b.numel() for b in unique.values()), initial=0), strict=False))
            members = [_Member(path, name, firsts[id(b)], tuple(b.shape)) for path, name, b in found]
            values = torch.cat([buffer.detach().cpu().reshape(-1) for buffer in unique.values()])
            rows = values.to(stored_dtype(dtype, members[0].label)).numpy()[None]
            label = members[0].label if len(members) == 1 else f"buffers.{str(dtype).removeprefix('torch.')}"
            central = np.repeat(rows, replicas if rule == "local" else 1, axis=0)
            self._packs.append(_Pack(dtype, members, Variable(central, trainable=False, name=label)))
        #: In the script, by a name in a table of buffers and the table's identity: the buffer's label, the table, and
        #: the tensor that was put there, with its version.
        self._noted: dict[tuple[int, str], tuple[str, dict[str, Any], torch.Tensor, int]] = {}
        for owner in {root.get_submodule(member.path) for pack in self._packs for member in pack.members}:
            vars(owner)[_KEY] = self
            self.empty(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_noted": {}}

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("the buffers of this module lie in the server; cst.pull(module) returns a plain copy")

    # --- in the script ----------------------------------------------------------------------------------------

    def load(self, owner: torch.nn.Module) -> None:
        """Give the buffers of one of the modules their present values; with the rule "local" those of replica 0."""
        for pack, members in self._of(owner):
            values = value_of(pack.variable, pack.dtype)[0]
            for member in members:
                self._put(owner, member, values[member.first : member.first + member.size].reshape(member.shape))

    def empty(self, owner: torch.nn.Module) -> None:
        """Take the values of the buffers of one of the modules away: they are in the server."""
        for pack, members in self._of(owner):
            for member in members:
                self._put(owner, member, empty_like(member.shape, pack.dtype))

    def _put(self, owner: torch.nn.Module, member: _Member, value: torch.Tensor) -> None:
        """Let a module have a tensor as its buffer, and note it, by which a change is noticed."""
        table: Any = owner._buffers  # noqa: SLF001
        table[member.name] = value
        self._noted[id(table), member.name] = member.label, table, value, value._version  # noqa: SLF001

    def check(self) -> None:
        """Raise InvalidArgumentError for a buffer that has been changed in the script."""
        for (_, name), (label, table, made, version) in self._noted.items():
            if made._version != version or table.get(name) is not made:  # noqa: SLF001
                raise InvalidArgumentError(
                    f"buffer {label} was changed in the script, but its value is in the server; change it by "
                    "load_state_dict or before cst.centralize, or give the function a keyword argument"
                )

    def store(self, owner: torch.nn.Module) -> None:
        """Give the server the buffers of one of the modules."""
        for pack, members in self._of(owner):
            values = value_of(pack.variable, pack.dtype)
            for member in members:
                buffer = _checked(getattr(owner, member.name), member, pack.dtype)
                values[:, member.first : member.first + member.size] = buffer.detach().reshape(-1)
            write_to(pack.variable, values)

    def _of(self, owner: torch.nn.Module) -> Iterator[tuple[_Pack, list[_Member]]]:
        for pack in self._packs:
            members = [member for member in pack.members if self.root.get_submodule(member.path) is owner]
            if members:
                yield pack, members

    # --- in a replica -----------------------------------------------------------------------------------------

    def begin(self, replica: int) -> None:
        """Let the module compute with copies of the central values."""
        for pack in self._packs:
            pack.begin(self.root, replica if self.rule == "local" else 0)

    def end(self, share: Share) -> None:
        """Note what the central values become after a step of this replica."""
        if not share.is_empty:
            for pack in self._packs:
                pack.end(self.root, self.rule, share)

    def drop(self) -> None:
        """End a run that changes no central value."""
        for pack in self._packs:
            pack.drop()


def buffers_of(owner: torch.nn.Module) -> CentralBuffers | None:
    """What knows the central values of the buffers that this module itself has; None if it has none."""
    found: CentralBuffers | None = vars(owner).get(_KEY)
    return found


def central_buffers(modules: Iterable[torch.nn.Module]) -> list[CentralBuffers]:
    """All that the modules have, each once."""
    return list(dict.fromkeys(found for each in modules if (found := buffers_of(each)) is not None))


def forget_buffers(root: torch.nn.Module) -> None:
    """Make the buffers of the module plain ones."""
    for owner in root.modules():
        vars(owner).pop(_KEY, None)


def _together(root: torch.nn.Module) -> Iterator[tuple[torch.dtype, list[tuple[str, str, torch.Tensor]]]]:
    """The buffers that share a variable: path and name of each, and the tensor."""
    small: dict[torch.dtype, list[tuple[str, str, torch.Tensor]]] = {}
    large: dict[int, list[tuple[str, str, torch.Tensor]]] = {}
    for label, buffer in root.named_buffers(remove_duplicate=False):
        path, _, name = label.rpartition(".")
        if buffers_of(root.get_submodule(path)) is not None:  # it has been centralized with another module
            continue
        if buffer.numel() > _SHARED:
            large.setdefault(id(buffer), []).append((path, name, buffer))
        else:
            small.setdefault(buffer.dtype, []).append((path, name, buffer))
    yield from small.items()
    yield from ((found[0][2].dtype, found) for found in large.values())


def _checked(buffer: Any, member: _Member, dtype: torch.dtype) -> torch.Tensor:
    """A buffer that still is what was centralized."""
    if isinstance(buffer, torch.Tensor) and tuple(buffer.shape) == member.shape and buffer.dtype == dtype:
        return buffer
    now = f"{buffer.dtype} {list(buffer.shape)}" if isinstance(buffer, torch.Tensor) else type(buffer).__name__
    raise InvalidArgumentError(
        f"buffer {member.label} was {dtype} {list(member.shape)} when the module was centralized, and is {now} now; "
        "centralize the module in its last form"
    )


def _row(values: torch.Tensor, row: int) -> IndexedSlices:
    return IndexedSlices(values.cpu().numpy()[None], np.array([row]))
