"""What messages cost as records that are compiled, as plain frozen dataclasses, and as structures of msgspec.

    python benchmarks/records.py

Every message is built, written and read: processor time, the least of several interleaved rounds. The dataclasses have
the same fields, checks and codec. msgspec takes part where it is installed; its structures check only what they read,
and know no ranges.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import msgpack

import central_storage as cs
from cs_proto.codec import decode, encode, pack
from cs_proto.frozen import fields_of
from cs_proto.messages import Get, Return, Run, RunFinished, Value
from cs_proto.records import Frames, Record, _type_of

try:
    import msgspec
except ImportError:
    msgspec = None

Cycle = Callable[[], object]
ROUNDS, CALLS, STEPS = 7, 3000, 500
MESSAGES: tuple[Record, ...] = (
    Run((500,), 500, 1, 7, bytes(16), None, False, bytes(60), (), 490, 8, ()),
    Return((500,), 1, 1, (), 1, Value(b"body", ()), None, 490, 8, "c-1"),
    RunFinished((500,), (Value(b"body", ()), Value(b"body", ())), None, 500),
    Get(9, (1, 2, 3), (), False),
)
#: How many of each an empty step of two replicas has.
IN_A_STEP = (2, 2, 1, 0)


def by_records(message: Record) -> Cycle:
    """The messages as they are."""
    kind, values = type(message), list(message.__dict__.values())
    return lambda: decode(encode(kind(*values)))


def by_dataclasses(message: Record) -> Cycle:
    """Methods that go through the fields, in place of methods compiled for each class."""
    cls, values = type(message), list(message.__dict__.values())
    hints = typing.get_type_hints(cls, include_extras=True)
    kinds = {name: _type_of(hints[name]) for name in fields_of(cls)}

    def check(self: Any) -> None:
        for name, kind in kinds.items():
            value = self.__dict__[name]
            if type(value) not in kind.classes and not kind.holds(value):
                raise ValueError(name)

    fields = [(name, object) for name in kinds]
    made = make_dataclass(cls.__name__, fields, frozen=True, namespace={"__post_init__": check})

    def cycle() -> object:
        held, frames = made(*values).__dict__, []
        written = [kind.write(held[name], frames) if kind.write else held[name] for name, kind in kinds.items()]
        _, *read = msgpack.unpackb(pack([cls.code, *written]), max_ext_len=0)
        taken = Frames(frames)
        return made(*(k.read(w, taken) if k.read else w for k, w in zip(kinds.values(), read, strict=True)))

    return cycle


def by_msgspec(message: Record) -> Cycle:
    """Structures of the same shape."""

    def structure(record: Record) -> Any:
        values = {name: converted(value) for name, value in record.__dict__.items()}
        fields = [(name, type_of(value)) for name, value in values.items()]
        kind = msgspec.defstruct(type(record).__name__, fields, frozen=True, array_like=True, tag=record.code)
        return kind(**values)

    def converted(value: Any) -> Any:
        if isinstance(value, Record):
            return structure(value)
        return tuple(map(converted, value)) if isinstance(value, tuple) else value

    def type_of(value: Any) -> Any:
        return tuple[type_of(value[0]), ...] if isinstance(value, tuple) and value else type(value)  # type: ignore[misc]

    made = structure(message)
    kind, values = type(made), [getattr(made, name) for name in type(made).__struct_fields__]
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(kind)
    return lambda: decoder.decode(encoder.encode(kind(*values)))


def microseconds(cycles: dict[str, Cycle]) -> dict[str, float]:
    """The processor time of one call of each."""
    least = dict.fromkeys(cycles, float("inf"))
    for _ in range(ROUNDS):
        for name, cycle in cycles.items():
            begun = time.process_time()
            for _ in range(CALLS):
                cycle()
            least[name] = min(least[name], (time.process_time() - begun) / CALLS * 1e6)
    return least


def empty_step() -> float:
    """The microseconds that a step of two replicas lasts in which nothing is done."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        least = float("inf")
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(STEPS):
                strategy.run(tuple)
            least = min(least, (time.perf_counter() - begun) / STEPS * 1e6)
    return least


def main() -> None:
    """Print the table."""
    ways = {"records": by_records, "dataclasses": by_dataclasses} | ({"msgspec": by_msgspec} if msgspec else {})
    in_a_step = dict.fromkeys(ways, 0.0)
    for message, count in zip(MESSAGES, IN_A_STEP, strict=True):
        found = microseconds({name: way(message) for name, way in ways.items()})
        ratios = ", ".join(f"{name} {found[name] / found['records']:.2f}" for name in ways)
        print(f"{type(message).__name__:12} {found['records']:6.1f} µs as records; {ratios}")
        for name in ways:
            in_a_step[name] += count * found[name]
    step = empty_step()
    for name, taken in in_a_step.items():
        share = (taken - in_a_step["records"]) / step
        print(
            f"{name:12} {taken:6.1f} µs for the messages of an empty step, {share:+.0%} of the {step:.0f} µs it lasts"
        )


if __name__ == "__main__":
    main()
