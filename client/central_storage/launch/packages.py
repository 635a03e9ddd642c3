"""The directories of the project's packages, so that a child process imports the same ones.

Only a checkout whose folders are on this process's path needs this; an installed project does not.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sysconfig
from collections.abc import Mapping
from pathlib import Path

__all__ = ["python_path"]


def python_path(environment: Mapping[str, str]) -> str:
    """The PYTHONPATH of ``environment``, with the directories in front from which this process imports the packages
    of the four roles and which a fresh interpreter would not search. Empty where nothing is needed."""
    usual = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    directories = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    found: list[str] = []
    for package in ("central_storage", "cs_proto", "cs_runtime", "cs_server", "cs_worker"):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec else []:
            directory = str(Path(location).parent.absolute())
            if directory not in usual and directory not in found and directory not in directories:
                found.append(directory)
    return os.pathsep.join([*found, *directories])
