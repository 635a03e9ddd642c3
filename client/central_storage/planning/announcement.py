"""The line that a training prints at its first step: what it takes of the memory, and whether that is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from central_storage.diagnostics.logging_setup import announce, announces
from central_storage.variables.variable import Variable
from cs_proto.arrays import dtype_name
from cs_proto.messages import VariableSpec
from cs_proto.sizes import rounded
from cs_runtime import machine

from .plan import Optimizer, planned

__all__ = ["announce_plan", "line"]


class _Optimizer(Protocol):
    members: tuple[int, ...]

    @property
    def rule(self) -> str: ...


def announce_plan(
    variables: Iterable[Variable], optimizers: Iterable[_Optimizer], devices: Sequence[str], parameter_device: str
) -> None:
    """Print the line for these variables and optimizers, unless there are none, or ``CS_LOG`` asks for warnings or
    errors only."""
    specs = {each.number: _spec_of(each) for each in variables} if announces() else {}
    if specs:
        found = [Optimizer(each.rule, frozenset(each.members) or None) for each in optimizers]
        announce(line(specs, found, devices, parameter_device, machine.available_nbytes()))


def _spec_of(variable: Variable) -> VariableSpec:
    """What counts of a variable. Its name would take a message."""
    return VariableSpec(
        str(variable.number),
        dtype_name(variable.dtype),
        variable.shape,
        variable.trainable,
        0,
        0,
        sparse=variable.sparse,
    )


def line(
    specs: dict[int, VariableSpec],
    optimizers: Sequence[Optimizer],
    devices: Sequence[str],
    parameter_device: str,
    available: int,
) -> str:
    r"""The line, if ``available`` bytes are left beside the parameters, which are in memory already.

    Examples:
        >>> specs = {1: VariableSpec("w", "float32", (1000, 250), True, 0, 0)}
        >>> print(*line(specs, [Optimizer("adam")], ["cpu:0", "cpu:1"], "cpu:0", 10**9).split("; "), sep="\n")
        [central-storage] planned memory: parameters 1.0 MB, slots 2.0 MB, gradients 2 x 1.0 MB
        4.0 MB of these 5.0 MB are still to come, 1.0 GB available
    """
    plan = planned(specs, optimizers, devices, parameter_device)
    coming = plan.slots + plan.replicas * plan.gradients
    every = plan.parameters + coming
    said = (
        f"[central-storage] planned memory: {plan.described()}; {rounded(coming)} of these {rounded(every)} are "
        f"still to come, {rounded(available)} available"
    )
    return f"{said}: they do not fit" if coming > available else said
