"""Python imports this when it starts, if the directory is in PYTHONPATH."""

import call_counter

call_counter.answer_signals()
