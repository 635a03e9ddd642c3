"""``python -m cs_server`` is ``cs-server``."""

from .cli import run

run()
