"""Results in the notation of the recorded ones, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import central_storage as cs


def encode(value: Any) -> dict[str, Any]:
    """``value`` in the notation of ``goldens.json``."""
    if isinstance(value, cs.Variable):
        return {"t": "variable", "value": encode(value.numpy())}
    if isinstance(value, cs.IndexedSlices):
        shape = None if value.dense_shape is None else list(value.dense_shape)
        return {
            "t": "indexed_slices",
            "values": encode(value.values),
            "indices": encode(value.indices),
            "dense_shape": shape,
        }
    if isinstance(value, (cs.PerReplica, cs.Mirrored)):
        kind = "per_replica" if isinstance(value, cs.PerReplica) else "mirrored"
        return {"t": kind, "values": [encode(component) for component in value.values]}
    if isinstance(value, (np.ndarray, np.generic)):
        dtype = "string" if value.dtype.kind in "US" else value.dtype.name
        data = np.asarray(value, dtype=str) if dtype == "string" else np.asarray(value)
        return {"t": "tensor", "dtype": dtype, "shape": list(value.shape), "data": data.tolist()}
    if isinstance(value, Mapping):
        return {"t": "dict", "items": {key: encode(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"t": "list" if isinstance(value, list) else "tuple", "items": [encode(item) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"t": "py", "value": value}
    raise TypeError(f"a result of {type(value)} has no notation")


def shown(value: dict[str, Any]) -> str:
    """An encoded value in one line: ``T<float32[2] [1.0, 2.0]>``, ``py 'text'``, ``list[…]``, ``per_replica(…)``."""
    items, components = value.get("items"), value.get("values")
    match value["t"]:
        case "tensor":
            return f"T<{value['dtype']}{value['shape']} {_shortest(value['data'], value['dtype'])}>"
        case "py":
            return f"py {value['value']!r}"
        case "dict":
            return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in items.items()) + "}"
        case "list" | "tuple":
            return f"{value['t']}[{', '.join(map(shown, items))}]"
        case "per_replica" | "mirrored":
            return f"{value['t']}({', '.join(map(shown, components))})"
    return str(value)


def _shortest(data: Any, dtype: str) -> Any:
    """Numbers of a nest as the shortest text that reads back to the same one of ``dtype``, read as Python's."""
    if isinstance(data, list):
        return [_shortest(item, dtype) for item in data]
    return float(str(np.dtype(dtype).type(data))) if dtype in ("float32", "float16") else data


def differences(wanted: Any, got: Any, tolerance: float, path: str = "result") -> Iterator[str]:
    """Where ``got`` is not ``wanted``; floats may differ by ``tolerance`` of the size, and a tenth of it absolutely."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        if wanted.keys() != got.keys():
            yield f"{path}: {sorted(got)} instead of {sorted(wanted)}"
            return
        for key in wanted:
            yield from differences(wanted[key], got[key], tolerance, f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(got, list):
        if len(wanted) != len(got):
            yield f"{path}: {len(got)} instead of {len(wanted)}: {got} instead of {wanted}"
            return
        for index, (one, other) in enumerate(zip(wanted, got, strict=True)):
            yield from differences(one, other, tolerance, f"{path}[{index}]")
    elif isinstance(got, float) and not isinstance(wanted, bool) and isinstance(wanted, (int, float, str)):
        number = float(wanted)  # "nan", "inf" and "-inf" are written as text
        if not np.isclose(got, number, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
            yield f"{path}: {got} instead of {wanted}"
    elif type(wanted) is not type(got) or wanted != got:
        yield f"{path}: {got!r} instead of {wanted!r}"
