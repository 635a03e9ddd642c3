"""torch-one-process: one process, and as many threads as torch takes by itself."""

import sys

from model_peers.obeying import obey
from model_peers.training import TRAININGS, Alone

if __name__ == "__main__":
    training = TRAININGS[sys.argv[1]]
    obey(Alone(training, training.made(), training.batches()))
