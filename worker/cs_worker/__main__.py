"""``python -m cs_worker`` is ``cs-worker``."""

import gc
import sys

# What is imported stays: to look through it for garbage again and again is a fifth of what the imports take.
gc.disable()
from .cli import main  # noqa: E402

gc.freeze()
gc.enable()
sys.exit(main())
