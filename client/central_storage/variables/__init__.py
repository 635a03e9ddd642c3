"""Variables, sets of variables, gradient buffers, moving averages."""
