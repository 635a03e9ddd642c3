"""``python -m cs_worker`` is ``cs-worker``."""

import sys

from .cli import main

sys.exit(main())
