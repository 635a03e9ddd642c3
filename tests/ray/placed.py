"""The training of ``training.py`` on the workers that Ray has placed, as a test asks for.

cs-launch --ray ... tests/ray/placed.py          # prints the digest
cs-launch --ray ... tests/ray/placed.py STEP...  # and stops after these steps, until it gets SIGUSR1
"""

from __future__ import annotations

import os
import signal
import sys

from training import Training

import central_storage as cs


def main(stops: list[str]) -> None:
    """Train, and wait where told to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    strategy = cs.CentralStorageStrategy()

    def after(count: int) -> None:
        if str(count) in stops:
            print(f"stopped {count} {os.getpid()}", flush=True)
            signal.sigwait({signal.SIGUSR1})

    print("digest", strategy.num_replicas_in_sync, Training(strategy, 0.1).run(after, lookahead=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
