"""The training of ``training.py`` on the workers that Ray has placed, as a test asks for.

cs-launch --ray ... tests/ray/placed.py          # prints where Ray has placed them, and the digest
cs-launch --ray ... tests/ray/placed.py STEP...  # and stops after these steps, until it gets SIGUSR1; for steps after
                                                 # the last one, it trains again
"""

from __future__ import annotations

import os
import signal
import sys

from training import STEPS, Training

import central_storage as cs


def main(stops: list[str]) -> None:
    """Train, and wait where told to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    strategy = cs.CentralStorageStrategy()
    if strategy.cluster_resolver is not None:
        print("resolver", strategy.cluster_resolver.cluster_spec().as_dict(), flush=True)
    last = max(map(int, stops), default=1)
    for before in range(0, last, STEPS):

        def after(count: int, before: int = before) -> None:
            if str(before + count) in stops:
                print(f"stopped {before + count} {os.getpid()}", flush=True)
                signal.sigwait({signal.SIGUSR1})

        print("digest", strategy.num_replicas_in_sync, Training(strategy, 0.1).run(after, lookahead=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
