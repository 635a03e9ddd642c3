"""Every error this project raises of its own, in one tree; the tree is drawn in :mod:`cs_proto.errors`."""

from typing import TYPE_CHECKING

from cs_proto.errors import *  # noqa: F403
from cs_proto.errors import __all__ as __all__

from .diagnostics.tensorflow_names import attributes

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.errors")
