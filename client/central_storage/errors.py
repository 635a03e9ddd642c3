"""Every error this project raises of its own, in one tree; the tree is drawn in :mod:`cs_proto.errors`."""

from cs_proto.errors import *  # noqa: F403
from cs_proto.errors import __all__ as __all__
