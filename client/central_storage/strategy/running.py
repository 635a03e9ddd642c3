"""The strategies of this process whose services run, and what is said of one that nobody seems to need any more.

A service ends when nothing holds its strategy. In a notebook names of earlier cells often hold it.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import TYPE_CHECKING
from weakref import ref

from central_storage.diagnostics.holders import holders

if TYPE_CHECKING:
    from .service_strategy import CentralStorageStrategy

__all__ = ["name_earlier", "note", "running_strategies"]

_log = logging.getLogger("central_storage")

_made: list[ref[CentralStorageStrategy]] = []


def note(strategy: CentralStorageStrategy) -> None:
    """Remember a strategy that was just made, and forget those that are gone."""
    _made[:] = [*(each for each in _made if each() is not None), ref(strategy)]


def running_strategies() -> tuple[CentralStorageStrategy, ...]:
    """The strategies of this process whose services run, in the order in which they were made.

    A service ends when nothing holds its strategy any more. With this function a notebook finds one whose name it has
    overwritten, and ends it with :meth:`CentralStorageStrategy.shutdown`.

    Examples:
        >>> import central_storage as cs
        >>> before = cs.running_strategies()
        >>> strategy = cs.CentralStorageStrategy(in_process=True)
        >>> cs.running_strategies()[len(before):] == (strategy,)
        True
        >>> strategy.shutdown()
        >>> cs.running_strategies() == before
        True
    """
    return tuple(strategy for each in list(_made) if (strategy := each()) is not None and strategy.is_running)


def name_earlier(strategy: CentralStorageStrategy) -> None:
    """In a notebook or at a prompt, where cells are run again: say which earlier strategies still run, and why.

    Called when ``strategy`` first runs a function: by then the cells that make the model have been run again, too.
    """
    if not hasattr(sys, "ps1") or len(running_strategies()) < 2:
        return
    gc.collect()  # an old model often is a cycle
    running = running_strategies()
    for number, earlier in enumerate(running[: running.index(strategy)]):
        if not earlier.may_be_named:
            continue
        earlier.may_be_named = False  # once
        names = holders(earlier, vars(sys.modules["__main__"]))
        _log.warning(
            "the service of an earlier strategy still runs, with %d processes, because %s. Run the cells that made "
            "these again, or end it: central_storage.running_strategies()[%d].shutdown()",
            earlier.num_replicas_in_sync + 2,
            f"it is held by {', '.join(names)}" if names else "something outside the notebook's names holds it",
            number,
        )
