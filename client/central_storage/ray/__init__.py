"""Workers on the nodes of a Ray cluster. The only package that imports Ray, and only in processes that talk to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from central_storage.diagnostics.extras import require

from .cluster import RayCluster

if TYPE_CHECKING:
    from .train import CentralStorageTrainer, report, restore

__all__ = ["CentralStorageTrainer", "RayCluster", "report", "restore"]


def __getattr__(name: str) -> Any:
    """What needs Ray Train, which takes a second to import, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for library in ("ray", "pandas", "pyarrow"):
        require(library, "ray-train", name)
    from . import train

    return getattr(train, name)
