"""What the site shows otherwise than the source says it.

Docstrings name other things by Sphinx's roles, such as :meth:`save`; the site shows the name alone. A class whose
arguments ``__new__`` takes is shown with them, and a class that users do not call without any.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from docs.site import reference

_MADE = {
    f"{value.__module__}.{value.__qualname__}"
    for names in reference.pages().values()
    for name, value in names
    if name in reference.MADE and isinstance(value, type)
}


class Shown(griffe.Extension):
    """Changes what griffe has read before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called for every class when its members are known."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.members["__init__"] = cls.members["__new__"]
        if cls.path in _MADE:
            cls.members.pop("__init__", None)
