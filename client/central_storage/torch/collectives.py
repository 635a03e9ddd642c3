"""Sums and gathers over the replicas, through which gradients flow.

The loss of a replica is the mean over its share, and its gradients are multiplied by the share's weight when the server
adds them up. So a gradient that crosses replicas is multiplied by the weight of the replica where it arises, and
divided by the weight of the replica that it goes to. A replica without rows contributes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from central_storage.core.context import get_replica_context, has_strategy
from central_storage.core.values import convert_to_tensor
from cs_proto.errors import ContextError, InvalidArgumentError

from .share import Share, here

__all__ = ["all_gather", "all_reduce", "own_weight", "sum_over_replicas"]


def all_reduce(tensor: torch.Tensor, op: Literal["sum", "mean"] = "sum") -> torch.Tensor:
    """Add up a tensor over the replicas, element by element. Gradients flow through it.

    The loss that all replicas minimize together is the mean over the rows of the global batch, and the gradient of
    ``all_reduce`` is the exact one of this loss. Every replica must make the same calls. Outside of a replica the
    tensor is returned as it is.

    Args:
        tensor: A floating-point or integer tensor, of the same shape and dtype in every replica.
        op: "sum", or "mean": the sum divided by the number of replicas that have rows of the batch.

    Returns:
        A tensor of the same shape and dtype, with the same bits in every replica.

    Raises:
        InvalidArgumentError: ``op`` is another one (a ValueError).
        ContextError: Called in a scope, outside of every replica (a RuntimeError).
        MergeMismatchError: Replicas combine different shapes or dtypes, or make different calls; raised by the run.

    Examples:
        >>> import torch
        >>> import central_storage.torch as cst
        >>> cst.all_reduce(torch.ones(2))
        tensor([1., 1.])
    """
    if op not in ("sum", "mean"):
        raise InvalidArgumentError(f"op must be 'sum' or 'mean', not {op!r}")
    share = _share("all_reduce")
    if share is None:
        return tensor
    total: torch.Tensor = _Sum.apply(tensor, share)
    return total if op == "sum" else total / share.replicas


def all_gather(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate a tensor over the replicas, in the order of the rows. Gradients flow through it.

    As :func:`all_reduce`; the lengths along ``dim`` may differ between replicas.

    Args:
        tensor: A tensor of at least one axis.
        dim: The axis; a negative one counts from the end.

    Returns:
        The tensors of all replicas one after the other. A replica without rows contributes none.

    Raises:
        InvalidArgumentError: There is no such axis (a ValueError).
        ContextError: Called in a scope, outside of every replica (a RuntimeError).
        MergeMismatchError: Replicas gather different shapes or dtypes, or make different calls; raised by the run.

    Examples:
        >>> import torch
        >>> import central_storage.torch as cst
        >>> cst.all_gather(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidArgumentError(f"dim must be an axis of the tensor, which has {tensor.dim()}, not {dim}")
    share = _share("all_gather")
    if share is None:
        return tensor
    gathered: torch.Tensor = _Gather.apply(tensor, dim % tensor.dim(), share)
    return gathered


def sum_over_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all replicas of what each gives, without a gradient. In the replica of a strategy."""
    context = get_replica_context()
    assert context is not None
    host = tensor.detach().cpu()
    widened = host.float() if host.dtype in (torch.bfloat16, torch.float16) else host
    total = context.all_reduce("SUM", widened.contiguous().numpy())
    return _tensor_of(total, tensor)


def _tensor_of(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the value that a collective returned, which on a GPU is an array of CuPy."""
    return torch.from_numpy(np.array(convert_to_tensor(value))).to(like.device, like.dtype)


def _share(what: str) -> Share | None:
    """The share of this replica; None where there is only this process."""
    context = get_replica_context()
    if context is None:
        raise ContextError(f"cst.{what} must be called inside a replica function")
    if not has_strategy() or context.is_local or here.is_repeating:
        return None
    if here.share is not None:
        return here.share
    return Share(int(context.replica_id_in_sync_group), 1.0, False, context.num_replicas_in_sync)


def _crossing(gradient: torch.Tensor, share: Share) -> torch.Tensor:
    """The gradient of the common loss for what all replicas have got, as this replica's own loss has it."""
    total = sum_over_replicas(gradient * share.weight)
    return total / own_weight(share) if not share.is_empty else torch.zeros_like(total)


def own_weight(share: Share) -> float:
    """The weight of a share with rows. Raises InvalidArgumentError if all its rows count nothing: the server multiplies
    the gradients of this replica by 0, so what other replicas have of its rows could not be differentiated."""
    if not share.weight:
        raise InvalidArgumentError(
            f"all rows of replica {share.replica} have the weight 0, but a gradient of other replicas flows to them; "
            "leave such rows out of the batch"
        )
    return share.weight


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.share = share
        return sum_over_replicas(torch.zeros_like(tensor) if share.is_empty else tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _crossing(gradient, ctx.share), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, share: Share) -> torch.Tensor:
        context = get_replica_context()
        assert context is not None
        own = tensor.narrow(dim, 0, 0) if share.is_empty else tensor
        lengths = torch.zeros(context.num_replicas_in_sync, dtype=torch.int64)
        lengths[share.replica] = own.shape[dim]
        ctx.first = int(sum_over_replicas(lengths)[: share.replica].sum())
        ctx.share, ctx.dim, ctx.length, ctx.shape = share, dim, own.shape[dim], tensor.shape
        host = own.detach().cpu()
        widened = host.float() if host.dtype in (torch.bfloat16, torch.float16) else host
        whole = context.all_gather(widened.contiguous().numpy(), axis=dim)
        return _tensor_of(whole, tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = _crossing(gradient, ctx.share)
        if ctx.share.is_empty:
            return torch.zeros(ctx.shape, dtype=gradient.dtype, device=gradient.device), None, None
        return whole.narrow(ctx.dim, ctx.first, ctx.length), None, None
