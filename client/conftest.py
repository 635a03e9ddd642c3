"""The examples of a package for a framework run where the framework is installed."""

import importlib.util

collect_ignore = [f"central_storage/{name}" for name in ("jax",) if importlib.util.find_spec(name) is None]
