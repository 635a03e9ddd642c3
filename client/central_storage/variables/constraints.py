"""The constraints of variables, which ``apply_gradients`` applies after its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from central_storage.core.values import IndexedSlices
from cs_proto.errors import InvalidArgumentError

from .variable import Variable

__all__ = ["constraints_after"]


def constraints_after(pairs: Sequence[tuple[object, Variable]]) -> Callable[[object], None] | None:
    """What ``apply_gradients`` has to merge_call after its update of these (gradient, variable) pairs; None where no
    variable has a constraint. Raises RuntimeError for a constraint of a variable with a sparse gradient."""
    constrained = [(gradient, variable) for gradient, variable in pairs if variable.constraint is not None]
    for gradient, variable in constrained:
        if isinstance(gradient, IndexedSlices):
            raise RuntimeError(
                f"variable {variable.name} has a constraint and a sparse gradient: a constraint needs the whole "
                "value; remove the constraint, or make the gradient dense"
            )
    if not constrained:
        return None

    def constrain(strategy: object) -> None:
        for _, variable in constrained:
            assert variable.constraint is not None
            value = variable.constraint(variable.value())
            try:
                variable.assign(value)
            except ValueError as error:
                raise InvalidArgumentError(
                    f"the constraint of {variable.name} returned a value that does not fit, after the update was "
                    f"committed: {error}"
                ) from error

    return constrain
