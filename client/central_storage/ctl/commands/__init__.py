"""The commands of ``cs-ctl``, one module for each."""
