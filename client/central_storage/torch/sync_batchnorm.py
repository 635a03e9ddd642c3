"""BatchNorm over the whole global batch: torch's own layer of this kind computes on GPUs only.

The mean comes first, in one sum over the replicas, and the squared differences from it in a second one: so no replica
subtracts large numbers from each other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .collectives import own_weight, sum_over_replicas
from .share import Share, here

__all__ = ["SyncBatchNorm", "synchronized"]

M = TypeVar("M", bound=torch.nn.Module)


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm that normalizes by the rows of all replicas, as one process with the whole batch would.

    ``cst.centralize(module, sync_batchnorm=True)`` puts it in the place of ``BatchNorm1d``, ``2d`` and ``3d``. Its
    arguments, parameters, buffers and state dict are those of these.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes an input of at least two axes, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalize the input, of the shape [rows, channels, ...]."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if here.share is None or not uses_batch:
            normalized: torch.Tensor = super().forward(input)
            return normalized
        mean, squares, count = _statistics(input, here.share)
        if self.training and self.running_mean is not None:
            self._track(mean, squares, count)
        channels = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(squares / count + self.eps)
        output = _Normalize.apply(input, mean.view(channels), scale.view(channels), count, here.share)
        if self.weight is not None:
            output = output * self.weight.view(channels) + self.bias.view(channels)
        return output.to(input.dtype)

    def _track(self, mean: torch.Tensor, squares: torch.Tensor, count: float) -> None:
        """Let the running statistics follow, as torch's BatchNorm does."""
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            self.running_var.lerp_((squares / max(count - 1, 1)).to(self.running_var.dtype), part)


def synchronized(module: M) -> M:
    """The module with :class:`SyncBatchNorm` in place of torch's BatchNorm layers, which are changed in place; one that
    is such a layer itself comes back as another object."""
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    made: dict[int, Any] = {}  # one for each layer, which may have several names
    for layer in [each for each in module.modules() if isinstance(each, kinds)]:
        made[id(layer)] = SyncBatchNorm.__new__(SyncBatchNorm)
        made[id(layer)].__dict__ = layer.__dict__  # the same parameters, buffers and hooks
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and id(layer) in made:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, made[id(layer)])
    found: M = made.get(id(module), module)
    return found


def _statistics(given: torch.Tensor, share: Share) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean and sum of squared differences of each channel, and the number of elements in one, over all replicas."""
    with torch.no_grad():
        rows = given.detach().transpose(0, 1).reshape(given.shape[1], -1)
        rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
        if share.is_empty:
            rows = rows[:, :0]
        count = rows.shape[1]
        total = sum_over_replicas(torch.cat([rows.sum(1), rows.new_full((1,), count)]))
        whole = float(total[-1])
        if whole <= 1:
            raise ValueError(
                f"BatchNorm in training needs more than one value for each channel, not {list(given.shape)}"
            )
        mean = total[:-1] / whole
        squares = sum_over_replicas((rows - mean[:, None]).square().sum(1))
    return mean, squares, whole


class _Normalize(torch.autograd.Function):
    """(x - mean) * scale, where mean and scale depend on the x of all replicas."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, count: float, share: Share
    ) -> torch.Tensor:
        normalized = (given - mean) * scale
        ctx.save_for_backward(normalized, scale)
        ctx.count, ctx.share, ctx.dtype = count, share, given.dtype
        return normalized

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        normalized, scale = ctx.saved_tensors
        share, axes = ctx.share, [0, *range(2, gradient.dim())]
        sums = torch.stack([gradient.sum(axes), (gradient * normalized).sum(axes)]) * share.weight
        plain, along = sum_over_replicas(sums)
        shape = scale.shape
        # Of the common loss, as this replica's own loss has it: see collectives.
        part = 0.0 if share.is_empty else 1 / (ctx.count * own_weight(share))
        change = gradient - part * (plain.view(shape) + normalized * along.view(shape))
        return (change * scale).to(ctx.dtype), None, None, None, None
