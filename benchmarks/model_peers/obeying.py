"""How `bench_models.py` commands a program over standard input and output. This module needs no other package."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Protocol

BATCHES = 8  # different ones, which are used in turn
IS_SMALL = bool(os.environ.get("BENCHMARK_SMALL_MODELS"))


class Trainer(Protocol):
    """A program that trains."""

    def run(self, steps: int) -> float:
        """Do so many steps. Return the loss of the last one, a mean over the rows of its batch."""


def obey(trainer: Trainer, is_speaker: bool = True) -> None:
    """Do what standard input says: for each line, a number of steps, print ``{"seconds": of a step, "loss": ...}``. The
    end of the input ends it. Of several processes that all come here, one is the speaker."""
    if is_speaker:
        print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        loss = trainer.run(int(line))
        seconds = (time.perf_counter() - begun) / int(line)
        if is_speaker:
            print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
