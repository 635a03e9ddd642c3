"""The device of a worker, and faults of native code."""
