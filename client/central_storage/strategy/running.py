"""The strategies of this process whose services run, and what is said of one that nobody seems to need any more.

A service ends when nothing holds its strategy. In a notebook names of earlier cells often hold it.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any
from weakref import WeakSet, ref

from central_storage.core.handles import Handle
from central_storage.diagnostics.holders import holders

__all__ = ["name_earlier", "note", "running"]

_log = logging.getLogger("central_storage")

_made: list[ref[Any]] = []
_named: WeakSet[Any] = WeakSet()


def note(strategy: Handle) -> None:
    """Remember a strategy that was just made, and forget those that are gone."""
    _made[:] = [*(each for each in _made if each() is not None), ref(strategy)]


def running() -> list[Any]:
    """The strategies of this process whose services run, in the order in which they were made."""
    return [strategy for each in list(_made) if (strategy := each()) is not None and strategy.is_running]


def name_earlier(strategy: Handle) -> None:
    """In a notebook or at a prompt, where cells are run again: say which earlier strategies still run, and why.

    Called when ``strategy`` first runs a function: by then the cells that make the model have been run again, too.
    """
    if not hasattr(sys, "ps1") or len(running()) < 2:
        return
    gc.collect()  # an old model often is a cycle
    for number, earlier in enumerate(running()):
        if earlier is strategy:
            return
        if earlier in _named:
            continue
        _named.add(earlier)
        names = holders(earlier, vars(sys.modules["__main__"]))
        _log.warning(
            "the service of an earlier strategy still runs, with %d processes, because %s. Run the cells that made "
            "these again, or end it: cs.running_strategies()[%d].shutdown()",
            earlier.num_replicas_in_sync + 2,
            f"it is held by {', '.join(names)}" if names else "something outside the notebook's names holds it",
            number,
        )
