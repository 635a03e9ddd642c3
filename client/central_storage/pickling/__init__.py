"""Functions and their arguments on the way to a worker: pickled, analysed, reconstructed."""
