"""Errors that torch's users expect to be of torch's types, too."""

from cs_proto.errors import InvalidArgumentError

__all__ = ["StateDictError"]


class StateDictError(InvalidArgumentError, RuntimeError):
    """A state dict whose values have other shapes than the module. Nothing was loaded. torch raises a RuntimeError."""
