"""Tables in a replica on a GPU, or on another machine: only the rows of look-ups are copied there.

On a CPU of the service's machine a table is a parameter over the server's memory, as all are. Elsewhere it has its
shape and no values, so it may be larger than the memory there; ``torch.nn.functional.embedding`` and ``embedding_bag``
fetch the rows that they need.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn import functional

from central_storage.core.context import current_replica, get_array_module
from central_storage.nn import embedding_lookup
from cs_proto.errors import InvalidArgumentError

from .parameters import CentralParameter

__all__ = ["has_rows_only", "show_rows_only"]


def has_rows_only(p: CentralParameter) -> bool:
    """Whether this replica has only rows of the parameter, which is a table."""
    if not p.variable.sparse:
        return False
    backend = current_replica(p.variable.strategy)
    assert backend is not None
    return get_array_module() is not np or backend.is_carried(p.variable.number)


def show_rows_only(p: CentralParameter) -> None:
    """Let a table have its shape on the present device, and its rows only in look-ups."""
    device = torch.from_dlpack(get_array_module().empty(0, "float32")).device
    p.data = torch.full((), math.nan, dtype=p.dtype, device=device).expand(p.shape)
    p.__class__ = _Table


class _Table(CentralParameter):
    """A table without values: torch asks it before it computes with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        look_up = _LOOK_UPS.get(func)
        if look_up is not None:
            return look_up(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (as torch's documents show it)
            result = func(*args, **(kwargs or {}))
        is_value = isinstance(result, torch.Tensor) and not any(result is each for each in args)
        if is_value and (result.grad_fn is not None or func.__name__ != "__get__"):
            table = next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, _Table))
            _refuse(table, f"{func.__name__} needs all of it")
        return result


def _refuse(table: Any, why: str) -> NoReturn:
    raise InvalidArgumentError(
        f"parameter {table.variable.name} is a table (sparse=True), of which a GPU or another machine has only the "
        f"rows of look-ups, and {why}; make the module without sparse=True, or look the rows up"
    )


def _check(table: Any, max_norm: Any, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        _refuse(table, "max_norm would write to it")
    if scale_grad_by_freq:
        _refuse(table, "scale_grad_by_freq is not defined for gradients of rows")


def _embedding(
    input: torch.Tensor,  # noqa: A002  (torch's name)
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.embedding``."""
    _check(weight, max_norm, scale_grad_by_freq)
    return _rows(weight, input, padding_idx)


def _plain_embedding(
    weight: Any, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> torch.Tensor:
    """``torch.embedding``, where -1 is no row."""
    return _embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq)


def _embedding_bag(
    input: torch.Tensor,  # noqa: A002  (torch's name)
    weight: Any,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.embedding_bag``, over the rows that were looked up in place of the table."""
    _check(weight, max_norm, scale_grad_by_freq)
    rows = _rows(weight, input.reshape(-1), None)
    numbers = torch.arange(len(rows), device=rows.device).reshape(input.shape)
    if padding_idx is not None:  # one more row stands for all rows of padding, which count in no bag
        numbers = torch.where(input == padding_idx % len(weight), len(rows), numbers)
        padding_idx = len(rows)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return functional.embedding_bag(
        numbers,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


_LOOK_UPS: dict[Any, Any] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    torch.embedding: _plain_embedding,
}


def _rows(table: Any, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
    return _LookUp.apply(table, ids, None if padding is None else padding % len(table))


class _LookUp(torch.autograd.Function):
    """Rows of a table; the gradient is sparse, and has none of the row ``padding``, as that of torch's embedding."""

    @staticmethod
    def forward(ctx: Any, table: Any, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.shape = padding, table.shape
        return torch.from_dlpack(embedding_lookup(table.variable, ids)).to(table.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ids = ctx.saved_tensors[0].reshape(-1)
        values = gradient.reshape(-1, *ctx.shape[1:])
        if ctx.padding is not None:
            counts = ids != ctx.padding
            ids, values = ids[counts], values[counts]
        return torch.sparse_coo_tensor(ids[None], values, ctx.shape, check_invariants=False), None, None
