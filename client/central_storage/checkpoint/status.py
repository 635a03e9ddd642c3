"""The result of a restore: what objects and checkpoint have in common, and what not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Self

from central_storage.core.public_objects import Closed
from cs_proto.errors import CheckpointMismatchError
from cs_proto.printable import printable

__all__ = ["Status", "difference"]

_log = logging.getLogger("central_storage.saving")


class Status(Closed):
    """The result of a restore. Objects and checkpoint may differ; call a method to say what you expect.

    ``matched`` is the number of values that were restored. ``missing`` names the values that objects need and the
    checkpoint lacks, ``unused`` the values that the checkpoint holds and no object uses. If no method is called,
    differences are logged when this object is deleted.
    """

    def __init__(self, path: str | None, missing: Iterable[str], unused: Iterable[str], matched: int = 0) -> None:
        self.path = path
        self.matched = matched
        self.missing = tuple(sorted(missing))
        self.unused = tuple(sorted(unused))
        self._expected = False

    def assert_consumed(self) -> Self:
        """Raise CheckpointMismatchError (an AssertionError) unless objects and checkpoint hold the same values."""
        self.assert_existing_objects_matched()
        if self.unused:
            raise CheckpointMismatchError(
                f"{self.path} holds values that no object uses: {_listed(self.unused)}; give the Checkpoint the "
                "objects that were saved, make their variables first, or call expect_partial()"
            )
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Raise CheckpointMismatchError (an AssertionError) if an object has a value that was not restored."""
        self._expected = True
        if self.path is None:
            raise CheckpointMismatchError("there was no checkpoint to restore")
        if self.missing:
            raise CheckpointMismatchError(
                f"{self.path} does not hold {_listed(self.missing)}; give the Checkpoint the objects that were saved, "
                "under their names, or call expect_partial()"
            )
        return self

    def assert_nontrivial_match(self) -> Self:
        """Raise CheckpointMismatchError (an AssertionError) if no value was restored. Accepts other differences."""
        self._expected = True
        if not self.matched:
            raise CheckpointMismatchError(
                f"{self.path} holds no value of the objects: {difference(self.missing, self.unused)}; give the "
                "Checkpoint the objects that were saved, under their names"
                if self.path is not None
                else "there was no checkpoint to restore"
            )
        return self

    def expect_partial(self) -> Self:
        """Accept differences."""
        self._expected = True
        return self

    def __repr__(self) -> str:
        if self.path is None:
            return "<Status: there was no checkpoint>"
        return f"<Status of {self.path}: {difference(self.missing, self.unused) or 'nothing differs'}>"

    def __del__(self) -> None:
        if self.path is not None and not self._expected and (self.missing or self.unused):
            _log.warning("%s: %s", self.path, difference(self.missing, self.unused))


def difference(missing: Iterable[str], unused: Iterable[str]) -> str:
    """The names that only one side has, in words."""
    parts = ((missing, "it does not hold"), (unused, "no object uses"))
    return "; ".join(f"{says} {_listed(names)}" for names, says in parts if names)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(map(printable, shown[:20])) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
