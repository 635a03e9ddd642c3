"""Numbers of bytes for people."""

from __future__ import annotations

import pytest

from cs_proto.sizes import in_units


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, ""),
        (9_999, ""),
        (10_000, " (9.8 KiB)"),
        (1024**2 - 1, " (1.0 MiB)"),
        (1024**2, " (1.0 MiB)"),
        (3 * 2**29, " (1.5 GiB)"),
        (2**63, " (8.0 EiB)"),
        (2**80, " (1048576.0 EiB)"),
    ],
)
def test_units(nbytes: int, text: str) -> None:
    assert in_units(nbytes) == text
