"""What the tests of the engine share."""

from __future__ import annotations

import pytest
from tests.harness.book import Book


@pytest.fixture
def book() -> Book:
    return Book()
