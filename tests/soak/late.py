"""P6: ``cs-launch`` on a kernel that is slow to kill: a worker that is silent for too long is replaced, and lives on.

What the supervisor does about the death of a process that it has killed it does here while the process still lives,
stopped. The nemesis continues it then, and what it says, late, must be refused. Run as a module in the launcher's
place.
"""

from __future__ import annotations

import signal
import sys
from typing import Any
from unittest import mock

from central_storage.launch import cli, foreground
from central_storage.launch.supervisor import children, lifecycle
from central_storage.launch.supervisor.children import Child

__all__ = ["LateChild"]


class LateChild(Child):
    """A process of a service that outlives its being killed."""

    _is_late = False

    def signal(self, number: int) -> None:
        """As the supervisor wants it, but for a SIGKILL for which there is a reason."""
        if number != signal.SIGKILL or not self._reason or self.returncode is not None:
            super().signal(number)
            return
        self._is_late = True
        self.returncode = -signal.SIGKILL
        self._on_end(self)

    def _ended(self) -> None:
        if self._is_late:  # its end was told already
            self._on_end = lambda _: None
        super()._ended()


def _end_leftovers(run_directory: str, role: str | None = None, rank: int | None = None) -> None:
    """Of a process that has ended nothing is ended: that would be the process itself."""
    if role is None:
        children.end_leftovers(run_directory)


def _service(*arguments: Any, **options: Any) -> lifecycle.Service:
    return lifecycle.Service(*arguments, **{**options, "start_child": LateChild})


def main() -> int:
    """``cs-launch`` with such children."""
    with (
        mock.patch.object(foreground, "Service", _service),
        mock.patch.object(lifecycle, "end_leftovers", _end_leftovers),
    ):
        return cli.main()


if __name__ == "__main__":
    sys.exit(main())
