"""The names that hold an object, in a heap where some references lead nowhere."""

from __future__ import annotations

import weakref

from central_storage.diagnostics.holders import holders


class Model:
    pass


def test_a_proxy_of_an_object_that_is_gone_is_passed_over() -> None:
    model, held = Model(), object()
    names = {"proxies": [weakref.proxy(model)], "holder": [held]}
    del model
    assert holders(held, names) == ["holder"]
