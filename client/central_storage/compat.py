"""``cs.compat``: the older ways to write the names of TensorFlow 2. ``cs.compat.v2`` is ``cs`` itself."""

import sys
from typing import TYPE_CHECKING

from .diagnostics.tensorflow_names import attributes

__all__ = ["v2"]

v2 = sys.modules[__name__.rpartition(".")[0]]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.compat")
