"""``python -m cs_server`` is ``cs-server``."""

import sys

from .cli import main

sys.exit(main())
