"""The functions a worker holds for those who send runs.

A sender leaves out the bytes of a function among the last it sent, so both ends keep the same
:class:`~cs_proto.function_cache.FunctionCache`. An ordinary function is unpickled anew for every run, so its captured
values are the sender's. A frozen one (``cs.function``) is one object for good. The loop calls this once for every run
that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from central_storage.pickling.pickler import load_function
from cs_proto.arrays import Array
from cs_proto.errors import PeerProtocolError
from cs_proto.function_cache import HELD_FUNCTIONS, FunctionCache
from cs_proto.messages import Run

__all__ = ["Functions"]

Resolve = Callable[[str, int], object]


class Functions:
    """Functions by digest, for one controller and one holder of tokens at a time."""

    def __init__(self, look: Callable[[Array], np.ndarray]) -> None:
        """``look`` gives the bytes behind a descriptor."""
        self._look = look
        # Those of the controller, and those of nested runs.
        self._held = [_Held(b"", look), _Held(b"", look)]

    def load(self, sender: bytes, run: Run, resolve: Resolve) -> Callable[..., Any]:
        """The function of a run that ``sender`` sent; runs the user's code, since unpickling imports.

        Raises PeerProtocolError where the run left the function out and this worker does not have it, and whatever
        unpickling raises.
        """
        is_nested = len(run.run) > 1
        held = self._held[is_nested]
        if held.sender != sender:  # another controller, which has not sent these functions
            held = self._held[is_nested] = _Held(sender, self._look)
        if run.frozen and run.digest in held.frozen:
            return held.frozen[run.digest]
        return held.load(run, resolve)

    def forget(self, sender: bytes, digests: Iterable[bytes]) -> None:
        """``sender`` does not run these frozen functions again."""
        held = self._held[False]
        if held.sender == sender:
            held.forget(digests)


class _Held:
    """The functions that one sender has sent."""

    def __init__(self, sender: bytes, look: Callable[[Array], np.ndarray]) -> None:
        self.sender = sender
        self._look = look
        self._recent = FunctionCache(HELD_FUNCTIONS)
        self._pickles: dict[bytes, bytes] = {}
        self._frozen_pickles: dict[bytes, bytes] = {}
        self.frozen: dict[bytes, Callable[..., Any]] = {}

    def load(self, run: Run, resolve: Resolve) -> Callable[..., Any]:
        """A new object for the function of a run."""
        if run.frozen:
            function: Callable[..., Any] = load_function(self._take(run, self._frozen_pickles), resolve)
            self.frozen[run.digest] = function
            del self._frozen_pickles[run.digest]  # not earlier: a failed import may succeed at the next run
            return function
        self._recent.touch(run.digest)
        for digest in [digest for digest in self._pickles if digest not in self._recent]:
            del self._pickles[digest]
        loaded: Callable[..., Any] = load_function(self._take(run, self._pickles), resolve)
        return loaded

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self.frozen.pop(digest, None)
            self._frozen_pickles.pop(digest, None)

    def _take(self, run: Run, pickles: dict[bytes, bytes]) -> bytes:
        if run.function is not None:
            pickles[run.digest] = self._look(run.function).tobytes()
        try:
            return pickles[run.digest]
        except KeyError:
            raise PeerProtocolError(
                f"the run was sent without function {run.digest.hex()}, which this worker does not hold"
            ) from None
