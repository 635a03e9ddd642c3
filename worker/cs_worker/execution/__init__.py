"""One replica runs the user's function: views of variables, gradients, merge calls, results."""
