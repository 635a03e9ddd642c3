"""Docstrings name other things by Sphinx's roles, such as :meth:`save`; the site shows the name alone."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Takes the roles away before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
