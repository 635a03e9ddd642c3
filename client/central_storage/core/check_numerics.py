"""The option ``check_numerics``: what a replica does about gradients that are not finite."""

from __future__ import annotations

import os
import typing

from cs_proto.errors import ConfigurationError
from cs_proto.messages import NumericsCheck

__all__ = ["CHECKS", "ENVIRONMENT", "check_of"]

#: The values of the option.
CHECKS: tuple[NumericsCheck, ...] = typing.get_args(NumericsCheck)
ENVIRONMENT = "CS_CHECK_NUMERICS"


def check_of(given: object) -> NumericsCheck:
    """The check of a strategy: the option of ``cs-launch``, then what the script has given, then the environment
    variable. None and an empty variable give none; without any the check is off. Raises ConfigurationError."""
    named, is_launched = os.environ.get(ENVIRONMENT), os.environ.get("CS_ROLE") == "script"
    what, said = "check_numerics", given
    if named and (given is None or is_launched):
        what, said = ENVIRONMENT, named
    for each in CHECKS:
        if said == each:
            return each
    if said is None:
        return "off"
    raise ConfigurationError(f"{what} must be one of {', '.join(map(repr, CHECKS))}, not {said!r:.40}")
