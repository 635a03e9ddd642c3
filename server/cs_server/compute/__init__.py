"""Updates on the CPU: rules, kernels, sparse rows, clipping, undo."""
