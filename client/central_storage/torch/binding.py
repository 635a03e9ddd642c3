"""In a replica: parameters over the server's memory, gradients in the buffers that it reads, and the update.

A :class:`Binding` belongs to one decorated function. In the script it checks the module and tells what has changed
since the function was sent. In a replica it prepares the module for each run, and collects what backward passes leave.
What is the same in every run is found once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from central_storage import optimizers as cs_optimizers
from central_storage.core.context import current_replica, get_array_module, get_replica_context, reading
from central_storage.core.values import IndexedSlices
from central_storage.variables.gradient_buffers import gradient_buffers
from cs_proto.errors import ContextError, InvalidArgumentError

from .buffers import central_buffers
from .centralize import remove_hooks
from .parameters import CentralParameter, check_unchanged, empty_like, name_of
from .share import Share, here
from .tables import has_rows_only, show_rows_only
from .watched import Watched
from .writes import raise_written

__all__ = ["Binding", "apply", "current"]

#: A gradient of more elements is copied into its buffer as soon as it is there, so that its memory is free again.
_LARGE = 1 << 14
#: What ``torch.nn.utils.clip_grad_norm_`` adds to the norm.
_CLIP_EPSILON = 1e-6
#: What torch's default dtype may be.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Binding:
    """The module and the optimizers of one decorated function."""

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[Any]) -> None:
        self.module = module
        self.optimizers = tuple(optimizers)
        self._find()
        self._check()
        self._watched = Watched(self.modules)
        self._sent = self._flags()  # what replicas have if they are told nothing

    def _find(self) -> None:
        self.modules = list(self.module.modules())
        self.parameters: list[Any] = list(self.module.parameters())

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("module", "optimizers", "_sent")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find()
        self._replica = _InReplica(self)

    # --- in the script ----------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Any:
        """The strategy of all parameters."""
        return self.parameters[0].variable.strategy

    def _check(self) -> None:
        """Raise InvalidArgumentError for a module or an optimizer that a replica could not use."""
        if not self.parameters:
            raise InvalidArgumentError("the module has no parameters")
        for name, p in self.module.named_parameters():
            if not isinstance(p, CentralParameter):
                raise InvalidArgumentError(
                    f"parameter {name} lies in this process and not in the server; call cst.centralize(module) first"
                )
            if p.variable.strategy is not self.strategy:
                raise InvalidArgumentError(f"parameter {name} belongs to another strategy than the first parameter")
        known = set(map(id, self.parameters))
        if len(set(map(id, self.optimizers))) < len(self.optimizers):
            raise InvalidArgumentError("an optimizer was given twice; give each once")
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "groups_for_update"):
                raise TypeError(
                    f"{type(optimizer).__module__}.{type(optimizer).__name__} computes in this process; use the "
                    "optimizer of the same name in cst.optim, or another one that it has"
                )
            for _, group in optimizer.groups_for_update():
                for p in group:
                    if id(p) not in known:
                        raise InvalidArgumentError(
                            f"{type(optimizer).__name__} has {name_of(p)}, which is not a parameter of the module; "
                            "give the function the module that has it, or several as torch.nn.ModuleList([...])"
                        )

    def changes(self) -> bytes | None:
        """What :meth:`present` returns, if it is not what was sent with the function."""
        flags = self.present()
        return None if flags == self._sent else flags

    def present(self) -> bytes:
        """The flags of modules and parameters. Raises InvalidArgumentError for what has been done to a parameter, a
        buffer or the parts of the module in the script."""
        self._watched.check()
        for p in self.parameters:
            check_unchanged(p)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ContextError(
                "autocast is enabled in the script, where nothing is computed; enable it in the function"
            )
        return self._flags()

    @property
    def version(self) -> int:
        """A number that changes with the attributes of modules that replicas keep a copy of."""
        return self._watched.version()

    def _flags(self) -> bytes:
        """torch's default dtype, whether each module is in training mode, and whether each parameter needs a
        gradient."""
        first = bytes([_DTYPES.index(torch.get_default_dtype())])
        return first + bytes([m.training for m in self.modules]) + bytes([p.requires_grad for p in self.parameters])

    # --- in a replica -----------------------------------------------------------------------------------------

    def begin(
        self, share: Share, flags: Sequence[int] | None, *, is_training: bool, steps_itself: bool = False
    ) -> _InReplica:
        """Prepare the module for a run. ``is_training``: not in eval mode, and its buffers change.
        ``steps_itself``: the decorator adds the backward pass and the steps."""
        flags = self._sent if flags is None else bytes(flags)
        if torch.get_default_dtype() is not _DTYPES[flags[0]]:
            torch.set_default_dtype(_DTYPES[flags[0]])
        flags = flags[1:]
        for m, mode in zip(self.modules, flags, strict=False):
            if m.training != (mode and is_training):
                m.training = bool(mode and is_training)
        for p, needs in zip(self.parameters, flags[len(self.modules) :], strict=True):
            if p.requires_grad != needs:
                p.requires_grad_(bool(needs))
        self._replica.begin(share, is_training, steps_itself)
        return self._replica


class _InReplica:
    """The state of a binding in a replica."""

    def __init__(self, binding: Binding) -> None:
        self.module = binding.module
        self.optimizers = binding.optimizers
        self.parameters = binding.parameters
        remove_hooks(self.module)
        self._buffers = central_buffers(binding.modules)
        self._epoch: object = None
        #: The parameters whose whole values are here.
        self._whole: list[Any] = []
        #: The parameters of 16 bits, their copies of this run, and the values in the server.
        self._cast: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self._hooked: set[int] = set()
        self._places: dict[int, tuple[Any, Any]] | None = None
        self._waiting: list[_Taken] = []
        #: By identity, the parameters whose gradients were taken since the last call of a module. Where the function
        #: steps itself, they have no values until :meth:`renew`.
        self._stepped: dict[int, Any] = {}
        self._clips: list[tuple[set[int], float]] = []
        self._is_stale = False
        self.share: Share
        self.is_training = True
        #: Calls the user's function once more.
        self.repeat: Callable[[], object]

    # --- the run ----------------------------------------------------------------------------------------------

    def begin(self, share: Share, is_training: bool, steps_itself: bool) -> None:
        """Let parameters and buffers have the present values. :meth:`leave` has taken the gradients away."""
        self.share, self.is_training, self.steps_itself = share, is_training, steps_itself
        self._places = None
        self._waiting.clear()
        self._clips.clear()
        self._stepped.clear()
        self._has_stepped = False
        here.share, _running.binding = share, self
        self._bind()
        for each in self._buffers:
            each.begin(share.replica)
        for p in self.parameters:
            if p.requires_grad and id(p) not in self._hooked:
                self._hooked.add(id(p))
                if p.numel() > _LARGE and not p.variable.sparse:
                    p.register_post_accumulate_grad_hook(self._collect)

    def end(self) -> None:
        """End a run that has succeeded: the last updates, and the buffers."""
        self.check()
        self._check_behind()
        self.flush()
        for each in self._buffers:
            if self.is_training:
                each.end(self.share)

    def refuse_left(self) -> None:
        """Raise ContextError if backward passes have left gradients for optimizers, and none of these has stepped: the
        next call does not have them."""
        if not self._has_stepped and self.optimizers and any(p.grad is not None for p in self.parameters):
            raise ContextError(
                "the function has computed gradients, and none of its optimizers has stepped: gradients do not outlive "
                "a call. Compute all parts of a batch in one call, as with accumulate of cst.step; or drop the "
                "gradients with optimizer.zero_grad()"
            )

    def hide_gradients(self) -> list[Any]:
        """Take the gradients away until :meth:`show_gradients` gets them."""
        gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return gradients

    def show_gradients(self, gradients: list[Any]) -> None:
        """Let the parameters have these gradients; without any, they stay as they are."""
        for p, gradient in zip(self.parameters, gradients, strict=False):
            p.grad = gradient

    def refuse_computed(self) -> None:
        """Raise ContextError if the function of ``cst.step`` has computed gradients itself: they would count twice."""
        if any(p.grad is not None for p in self.parameters):
            raise ContextError(
                "the function has called backward(), which cst.step does: only return the loss, or decorate the whole "
                "body of a loop, with zero_grad, backward and step, by cst.function"
            )

    def explain(self, error: RuntimeError) -> None:
        """Raise ContextError for torch's error about a write to a parameter that has no value after a step."""
        if self._is_stale and "refers to a single memory location" in str(error):
            raise ContextError(
                "the function has written to a parameter after optimizer.step(); in a replica a parameter has no value "
                "then until a module is called, and only optimizers change it. Change it in the script, between calls: "
                "parameter.variable.assign(value)"
            ) from error

    def leave(self) -> None:
        """Leave the run, however it has ended."""
        here.share = _running.binding = None
        for each in self._buffers:
            each.drop()
        for p in self.parameters:
            p.grad = None
        if self._is_stale:
            self._is_stale = False
            self._epoch = None
            _running.refresh.remove()

    def repeat_alone(self) -> None:
        """After an error of this run: call the user's function once more, where nobody looks for writes. What waits for
        an update is dropped, and parameters without values get none, because to read them would commit updates."""
        self._waiting, self._clips = [], []
        _running.refresh.remove()
        _running.binding = None
        try:
            self.repeat()
        finally:
            _running.binding = self

    def _check_behind(self) -> None:
        """Raise VariableWrittenError if the function has written without torch's knowledge, as through ``.data``, to a
        copy of a parameter, or to one that has no value. The worker looks at the server's memory only."""
        bits = torch.int16
        written = [
            p for p, copy, value in self._cast if not torch.equal(copy.view(bits), value.to(copy.dtype).view(bits))
        ]
        for p in self._stepped.values() if self._is_stale else ():
            value = p.detach().as_strided((), ()).item() if p.numel() else math.nan
            if value == value:  # not NaN
                written.append(p)
        if written:
            self._epoch = None
            raise_written(self, written)

    def _bind(self) -> None:
        if self._epoch is not None:
            self._whole[0].variable.current()
        if self._epoch is None or reading.epoch is not self._epoch:
            self._cast = []
            if any(p.is_protected for p in self.parameters):
                backend = current_replica(self.parameters[0].variable.strategy)
                assert backend is not None
                backend.protect([p.variable.number for p in self.parameters if p.is_protected])
            self._whole = [p for p in self.parameters if not has_rows_only(p)]
            for p in self.parameters:
                if has_rows_only(p):
                    show_rows_only(p)
                    continue
                value = torch.from_dlpack(p.variable)
                if value.dtype is p.dtype:
                    p.data = value
                else:
                    p.data = torch.empty(value.shape, dtype=p.dtype, device=value.device)
                    self._cast.append((p, p.data, value))
            if self._whole:
                self._whole[0].variable.current()  # so that the epoch is that of all of them
                self._epoch = reading.epoch
            self._note_state()
        for _, narrow, value in self._cast:
            narrow.copy_(value)

    def check(self) -> None:
        """Raise VariableWrittenError if the function has written to a parameter, or has given it other memory."""
        state = _state_of(self.parameters)
        if state != self._state:
            written = [p for p, now, was in zip(self.parameters, state, self._state, strict=True) if now != was]
            self._epoch = None  # they are bound anew
            raise_written(self, written)

    def _note_state(self) -> None:
        self._state = _state_of(self.parameters)

    # --- gradients --------------------------------------------------------------------------------------------

    def _collect(self, p: Any) -> None:
        """After a backward pass has left a large gradient: move it to its buffer. Later passes add to it there."""
        gradient = p.grad
        if gradient.layout is not torch.strided or gradient.requires_grad or _running.binding is not self:
            return
        if any(p is each for taken in self._waiting for each in taken.used):
            self.flush()  # its buffer holds a gradient that waits for an update
        place = self._place_of(p)
        if place is not None and gradient.dtype is place.dtype and gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
            p.grad = place

    def _place_of(self, p: Any) -> Any:
        found = self._all_places().get(id(p))
        return None if found is None else found[1]

    def _all_places(self) -> dict[int, tuple[Any, Any]]:
        """By the identity of a parameter, the array of its gradient and the tensor over it."""
        if self._places is None:
            self.flush()  # the server has the buffers then, and gives others
            dense = [p for p in self.parameters if p.requires_grad and not p.variable.sparse]
            arrays = gradient_buffers([p.variable for p in dense])
            make = torch.from_numpy if not arrays or isinstance(arrays[0], np.ndarray) else torch.from_dlpack
            self._places = {id(p): (array, make(array)) for p, array in zip(dense, arrays, strict=True)}
        return self._places

    def take(self, optimizer: Any) -> list[Any]:
        """Take the gradients of the parameters of an optimizer, for an update; the parameters that have one."""
        self.check()
        if self._stepped:
            self._refuse_stale(optimizer)
        if any(taken.optimizer is optimizer for taken in self._waiting):
            self.flush()
        if optimizer.find_unused_parameters:
            self._agree(optimizer)
        taken = _Taken(optimizer, [], [])
        moves: tuple[list[Any], list[Any]] = ([], [])
        for central, parameters in optimizer.groups_for_update():
            used = [p for p in parameters if p.grad is not None]
            if not self.share.weight:
                _clear(used)
            taken.groups.append((central, [(self._gradient(p, moves), p.variable) for p in used]))
            taken.used.extend(used)
        self._stepped.update((id(p), p) for p in taken.used)
        if moves[0]:
            with torch.no_grad():
                torch._foreach_copy_(*moves)
        self._waiting.append(taken)
        self._has_stepped = True
        return taken.used

    def _refuse_stale(self, optimizer: Any) -> None:
        """Raise ContextError for gradients that an earlier step has taken, or that were computed without values."""
        name = f"{type(optimizer).__name__}.step()"
        parameters = [p for _, group in optimizer.groups_for_update() for p in group]
        without_values = [p for p in parameters if id(p) in self._stepped]
        for p in without_values:
            if p.grad is not None and _values_of(p.grad).isnan().any():
                raise ContextError(
                    f"{name} got a gradient that is NaN, because {name_of(p)} has no value since an earlier step; a "
                    "call of a module, such as the one that has the parameter, brings the new values"
                )
        if without_values and all(p.grad is None for p in parameters):
            raise ContextError(
                f"{name} finds no gradients, because an earlier step has taken them: they belong to one step. Call "
                "backward() before each step"
            )

    def _gradient(self, p: Any, moves: tuple[list[Any], list[Any]]) -> Any:
        """The gradient in the form that the server takes. The parameter has none afterwards. ``moves`` has what is
        still to be copied: targets and sources."""
        gradient, p.grad = p.grad, None
        if gradient.layout is torch.sparse_coo:
            values, indices = gradient._values(), gradient._indices()[0]  # noqa: SLF001  (those of coalesce() are sorted)
            return IndexedSlices(_array(values), _array(indices), p.variable.shape)
        if p.variable.sparse:
            raise InvalidArgumentError(
                f"{name_of(p)} is the table of an Embedding(sparse=True), but has a dense gradient, as of a tie or a "
                "penalty; make the layer with sparse=False"
            )
        found = self._all_places().get(id(p))
        if found is None:
            return _array(gradient)
        array, place = found
        if gradient is not place:
            moves[0].append(place)
            moves[1].append(gradient)
        return array

    def _agree(self, optimizer: Any) -> None:
        """Give zeros to parameters that other replicas have used and this one has not."""
        parameters = [p for _, group in optimizer.groups_for_update() for p in group]
        used = np.array([p.grad is not None for p in parameters], np.int32)
        context = get_replica_context()
        assert context is not None
        for p, replicas, own in zip(parameters, context.all_reduce("SUM", used), used, strict=True):
            if replicas and not own:
                p.grad = _zeros(p)

    def clip(self, parameters: Iterable[Any], max_norm: float) -> None:
        """Bound the norm of the gradients of these parameters, summed over the replicas, in the next update."""
        self._clips.append((set(map(id, parameters)), max_norm))

    def flush(self) -> None:
        """Bring the gradients that were taken to the server, in one update if they are bounded alike."""
        waiting, self._waiting = self._waiting, []
        clips, self._clips = self._clips if waiting else [], [] if waiting else self._clips
        for group, norm in self._bounded(waiting, clips):
            pairs = [each for taken in group for each in taken.groups if each[1]]
            if pairs:
                cs_optimizers.apply_gradients(
                    pairs,
                    global_clipnorm=norm,
                    weight=self.share.weight,
                    clip_epsilon=0.0 if norm is None else _CLIP_EPSILON,
                )
        if waiting:
            self._places = None

    def _bounded(
        self, waiting: list[_Taken], clips: list[tuple[set[int], float]]
    ) -> list[tuple[list[_Taken], float | None]]:
        """What is updated together, with the bound of its norm."""
        found: list[tuple[list[_Taken], float | None]] = []
        left = list(waiting)
        for covered, norm in clips:
            inside = [taken for taken in left if taken.used and covered.issuperset(map(id, taken.used))]
            partly = [taken for taken in left if taken not in inside and any(id(p) in covered for p in taken.used)]
            missing = [p for p in self.parameters if id(p) in covered and p.grad is not None]
            twice = [taken for taken in inside if taken.optimizer.max_norm is not None]
            if twice:
                raise InvalidArgumentError(
                    f"{type(twice[0].optimizer).__name__} has max_norm, so its gradients are bounded already; leave "
                    "out either that or clip_grad_norm_"
                )
            if partly or missing:
                what = type(partly[0].optimizer).__name__ if partly else name_of(missing[0])
                raise InvalidArgumentError(
                    f"clip_grad_norm_ bounds the norm of what is updated together, but {what} is not updated together "
                    "with the rest of the clipped parameters; clip whole optimizers, and let all of them step before "
                    "the next forward pass"
                )
            left = [taken for taken in left if taken not in inside]
            found.append((inside, norm))
        found += [([taken], taken.optimizer.max_norm) for taken in left if taken.optimizer.max_norm is not None]
        free = [taken for taken in left if taken.optimizer.max_norm is None]
        return [*found, (free, None)] if free else found

    # --- several updates in one run ---------------------------------------------------------------------------

    def let_go(self, parameters: Iterable[Any]) -> None:
        """After an optimizer's step in the middle of a function: its parameters have no values until the next call of a
        module brings the new ones. Their versions rise, as in torch, so a graph of the old values is refused."""
        for p in parameters:
            p.data = empty_like(p.shape, p.dtype)
            with torch.no_grad():
                p.fill_(math.nan)
        self._note_state()
        if not self._is_stale:
            self._is_stale = True
            _running.refresh.register(self)

    def renew(self) -> None:
        """Let the parameters have the values after the updates so far."""
        self.check()
        self._check_behind()
        self._is_stale, self._epoch = False, None
        self._stepped.clear()
        for p in self.parameters:  # nothing may hold the old values, or they would be copied
            p.data = empty_like(p.shape, p.dtype)
        self._cast = []
        self.flush()
        self._bind()


def _state_of(parameters: Iterable[Any]) -> list[tuple[int, int]]:
    """By what a write to a tensor and a change of its memory are noticed."""
    return [(p._version, p.data_ptr()) for p in parameters]  # noqa: SLF001


class _Taken(NamedTuple):
    """The gradients for a step of an optimizer: pairs (optimizer of the server, pairs), and the parameters."""

    optimizer: Any
    groups: list[tuple[Any, list[tuple[Any, Any]]]]
    used: list[Any]


class _Refresh:
    """Renews the parameters of a binding at the next call of any module of this thread."""

    def __init__(self) -> None:
        self._handle: Any = None

    def register(self, binding: _InReplica) -> None:
        thread = threading.get_ident()

        def renew(module: torch.nn.Module, args: object) -> None:
            if threading.get_ident() == thread:
                self.remove()
                binding.renew()

        self.remove()
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(renew)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _Running(threading.local):
    """The binding of the function that this thread runs."""

    def __init__(self) -> None:
        self.binding: _InReplica | None = None
        self.refresh = _Refresh()


_running = _Running()


def current(what: str) -> _InReplica | None:
    """The binding of the function that runs here; None where the function is repeated to find a write. Raises
    ContextError elsewhere."""
    found = _running.binding
    if found is None and not here.is_repeating:
        raise ContextError(
            f"{what} must be called in a function that cst.function has decorated; cst.step does it by itself"
        )
    return found


def apply(optimizers: Sequence[Any], weight: float | None = None) -> None:
    """In a replica: take the gradients of these optimizers for an update. ``weight`` is that of the share."""
    found = current("optimizer.step()")
    if found is None:
        return
    if found.steps_itself:
        raise ContextError(
            "the function has called optimizer.step(), which cst.step does: only return the loss, or decorate the "
            "whole body of a loop, with zero_grad, backward and step, by cst.function"
        )
    for optimizer in optimizers:
        found.let_go(found.take(optimizer))


def _array(tensor: torch.Tensor) -> Any:
    """The array over the memory of a tensor; of 16 bits it is a copy of 32, as the variable is."""
    tensor = tensor.detach()
    tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    if tensor.device.type == "cpu":
        return tensor.numpy()
    return get_array_module().from_dlpack(tensor.contiguous())


def _clear(parameters: Iterable[Any]) -> None:
    """Let gradients that count nothing be zeros: they may be NaN, as those of a mean over no rows."""
    for p in parameters:
        _values_of(p.grad).zero_()


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    found = gradient.detach()
    return found._values() if found.is_sparse else found  # noqa: SLF001


def _zeros(p: Any) -> torch.Tensor:
    """The gradient of a parameter that another replica has used."""
    if not p.variable.sparse:
        return torch.zeros_like(p, memory_format=torch.contiguous_format)
    indices = torch.empty((1, 0), dtype=torch.int64, device=p.device)
    values = torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
