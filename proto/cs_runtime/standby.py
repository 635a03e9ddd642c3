"""A process that has imported what it needs, and waits to be told which server or worker it is.

``cs-launch`` starts such processes while the script is imported, because only the script knows the devices. The
supervisor writes one line of JSON: the arguments, the changes of the environment (None removes a variable) and the
processors. The process then runs the package as ``python -m`` does.

    python -m cs_runtime.standby cs_worker cs_worker.cli
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["main"]

_THREADS = "OPENBLAS_NUM_THREADS"


def main(package: str, modules: Sequence[str]) -> None:
    """Import ``modules``, wait for the line, and run ``package``. If the supervisor says nothing, just end."""
    gc.disable()  # the imported modules stay
    for module in modules:
        with suppress(ImportError):  # the package itself will say what is missing
            importlib.import_module(module)
    gc.enable()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    told = json.loads(line)
    threads = os.environ.get(_THREADS)
    for name, value in told["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if told["processors"]:
        with suppress(OSError):  # they were taken away meanwhile, so the process may run anywhere
            os.sched_setaffinity(0, told["processors"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if os.environ.get(_THREADS) != threads and not _set_numpy_threads():
        os.execv(sys.executable, [sys.executable, "-P", "-m", package, *told["arguments"]])
    sys.argv = [package, *told["arguments"]]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


def _set_numpy_threads() -> bool:
    """Give NumPy's library as many threads as the environment says now. It read the environment when it was loaded."""
    names = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")  # of NumPy 2 and 1
    numpy = next((sys.modules[name] for name in names if name in sys.modules), None)
    if numpy is None:  # it will read the environment
        return True
    try:
        threads = min(int(os.environ[_THREADS]), len(os.sched_getaffinity(0)))
        ctypes.CDLL(str(numpy.__file__)).scipy_openblas_set_num_threads64_(threads)
    except (AttributeError, KeyError, OSError, ValueError):  # another library than that of NumPy's own wheels
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
