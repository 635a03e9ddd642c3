"""``python -m cs_server`` is ``cs-server``."""

import atexit
import os
import sys

from .cli import main

code = main()
atexit._run_exitfuncs()  # noqa: SLF001  (there is no public name)
for stream in (sys.stdout, sys.stderr):
    stream.flush()
os._exit(code)  # nothing is left to do, and finalizing the interpreter would take a tenth of a second
