"""The packages for frameworks are collected where their frameworks are installed, as make test-interop does."""

import importlib.util

collect_ignore = [
    f"client/central_storage/{name}" for name in ("jax", "torch") if importlib.util.find_spec(name) is None
]
