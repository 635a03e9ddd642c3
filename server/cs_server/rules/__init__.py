"""The update rules: one table of what each optimizer does to a variable and its slots.

Owns the arithmetic of every rule that ``cs_proto.arithmetic.optimizers`` names; a module has the rules of one origin.
This package knows no memory layout, no message and no compiler, and imports no framework. ``compute.kernels`` applies
the rules, ``compute.sparse`` those of sparse gradients; the catalogue asks for a rule by name.
"""

from collections.abc import Mapping

from . import optax, papers, tensorflow, torch
from .rule import (
    MEAN_LANES,
    Array,
    Rule,
    Step,
    computed_in,
    grow,
    move,
    reference,
    scalars,
    scaled,
    squares,
    summed,
    trust_ratio,
)

__all__ = [
    "MEAN_LANES",
    "RULES",
    "Array",
    "Rule",
    "Step",
    "computed_in",
    "grow",
    "move",
    "reference",
    "scalars",
    "scaled",
    "squares",
    "summed",
    "trust_ratio",
]

RULES: Mapping[str, Rule] = {rule.name: rule for rule in (*tensorflow.RULES, *papers.RULES, *torch.RULES, *optax.RULES)}
