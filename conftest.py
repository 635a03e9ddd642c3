"""The packages for frameworks are collected where these are installed, as make test-interop and test-ray do."""

import importlib.util

collect_ignore = [
    f"client/central_storage/{name}" for name in ("jax", "ray", "torch") if importlib.util.find_spec(name) is None
]
