"""The peers: one program each, in the form that its makers would choose for the work. See ``program.py``."""
