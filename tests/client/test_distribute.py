"""``cs.distribute`` and ``cs.compat.v2``: other ways to write names of ``cs``."""

from __future__ import annotations

import types

import pytest

import central_storage as cs
from cs_proto.version import __version__


@pytest.mark.parametrize("namespace", [cs.distribute, cs.distribute.experimental])
def test_every_name_is_that_of_cs(namespace: types.ModuleType) -> None:
    for name in namespace.__all__:
        found = getattr(namespace, name)
        assert isinstance(found, types.ModuleType) or found is getattr(cs, name)


def test_both_printed_paths_are_the_strategy() -> None:
    assert cs.distribute.CentralStorageStrategy is cs.CentralStorageStrategy
    assert cs.distribute.experimental.CentralStorageStrategy is cs.CentralStorageStrategy
    assert cs.compat.v2.distribute.experimental.CentralStorageStrategy is cs.CentralStorageStrategy


def test_a_namespace_can_be_imported() -> None:
    from central_storage.distribute import experimental
    from central_storage.distribute.experimental import CentralStorageStrategy

    assert experimental.CentralStorageStrategy is CentralStorageStrategy


def test_the_version() -> None:
    assert cs.__version__ == __version__
