"""Limits of this process: descriptors and locked memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from central_storage.diagnostics.gpu_inventory import visible_gpus

from .finding import Finding, bad, good
from .memory import size

__all__ = ["descriptors", "locked_memory"]

# A service of two replicas does not start with 32 descriptors for each process, and works with 48. More replicas,
# dtypes and observers take more.
_LEAST = 128


def descriptors() -> Iterator[Finding]:
    """The limit of open files. A service raises it to the hard limit in its own processes, and the script keeps it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = min(_number(soft), _number(hard))
    if least < _LEAST:
        which = "hard limit, to which a service raises its own" if _number(hard) < _LEAST else "limit of a script"
        yield bad(
            "descriptors",
            f"{least} are allowed (the {which}), and a service needs {_LEAST} in each process",
            f"ulimit -n {_LEAST} or more (docker run --ulimit nofile=4096:1048576)",
        )
    else:
        yield good("descriptors", f"{_text(soft)} in a script, {_text(hard)} in a service's processes")


def locked_memory(gpus: int | None = None) -> Iterator[Finding]:
    """The limit of locked memory (``ulimit -l``), which counts where GPUs copy from shared memory."""
    if not (len(visible_gpus()) if gpus is None else gpus):
        return
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield good("locked memory", "no limit")
    else:
        yield good(
            "locked memory",
            f"{size(limit)} (ulimit -l); where the driver counts what it locks for GPUs, a worker says that it "
            "refuses, and copies are slower",
            "if a worker says so: ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )


def _text(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)


def _number(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
