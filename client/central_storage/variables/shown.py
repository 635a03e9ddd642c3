"""What a notebook shows of a variable: shape, dtype, device, range, and a histogram."""

from __future__ import annotations

import math

import numpy as np

from central_storage.diagnostics.html import Markup, histogram, section, table
from cs_proto.messages import VariableSpec
from cs_proto.sizes import in_units

__all__ = ["MOST_SAMPLED", "shown"]

#: A larger variable is shown by a sample of so many values.
MOST_SAMPLED = 100_000
_BARS = 40


def shown(spec: VariableSpec, device: str, sample: np.ndarray | None, why_not: str) -> str:
    """A variable as HTML. ``sample`` has its values or, of a large one, some of them; None if it could not be read,
    because of ``why_not``."""
    dtype, size = np.dtype(spec.dtype), math.prod(spec.shape)
    nbytes = size * dtype.itemsize
    rows: list[tuple[object, object]] = [
        ("shape", spec.shape),
        ("dtype", f"{dtype}, {nbytes} bytes{in_units(nbytes)}"),
        ("device", device),
    ]
    parts: list[str] = []
    if sample is None:
        rows.append(("values", why_not))
    elif sample.size:
        of = f" of {sample.size} of {size} values" if sample.size < size else ""
        numbers, what = _real(sample)
        finite = numbers[np.isfinite(numbers)]
        if finite.size < numbers.size:
            rows.append((f"not finite{of}", numbers.size - finite.size))
        if finite.size:
            low, high = finite.min(), finite.max()
            rows.append((f"{what}{of}", f"{low:.6g} to {high:.6g}, mean {finite.mean(dtype=np.float64):.6g}"))
            parts.append(_histogram(finite, float(low), float(high)))
    return section(f"cs.Variable {spec.name}", table(rows), *parts)


def _real(sample: np.ndarray) -> tuple[np.ndarray, str]:
    """The values as real numbers, and what they are."""
    if sample.dtype.kind == "c":
        return np.abs(sample), "magnitude"
    return (sample.astype(np.uint8) if sample.dtype.kind == "b" else sample), "range"


def _histogram(finite: np.ndarray, low: float, high: float) -> Markup:
    scale = max(abs(low), abs(high)) or 1.0  # the width of a range of float64 may not be finite
    scaled = np.asarray(finite, np.float64) / scale
    if low == high:
        counts = np.zeros(_BARS, np.int64)
        counts[_BARS // 2] = finite.size
    else:
        counts, _ = np.histogram(scaled, _BARS, (low / scale, high / scale))
    return histogram(counts.tolist(), f"{low:.4g}", f"{high:.4g}")
