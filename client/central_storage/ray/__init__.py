"""Workers on the nodes of a Ray cluster. The only package that imports Ray, and only in processes that talk to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from central_storage.diagnostics.extras import require

from .cluster import RayCluster
from .row_client import rows

if TYPE_CHECKING:
    from .data import dataset
    from .train import CentralStorageTrainer, dataset_shard, report, restore, row_numbers

__all__ = [
    "CentralStorageTrainer",
    "RayCluster",
    "dataset",
    "dataset_shard",
    "report",
    "restore",
    "row_numbers",
    "rows",
]

_LIBRARIES = ("ray", "pandas", "pyarrow")


def __getattr__(name: str) -> Any:
    """What needs Ray Train or Ray Data, which take a second to import, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for library in _LIBRARIES:
        require(library, "ray-train", name)
    from . import data, train

    return data.dataset if name == "dataset" else getattr(train, name)
