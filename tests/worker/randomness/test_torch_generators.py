"""torch's generators are seeded where torch is loaded, and else when it is; on a stand-in for torch."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from central_storage.core.random_streams import Streams
from cs_proto.messages import RunId
from cs_worker.randomness.seeds import Seeds, kept_random_state
from cs_worker.randomness.torch_generators import GENERATORS, _Finder

# What is asked of torch: generators that count what was drawn since they were seeded.
STAND_IN = """
class Generator:
    def __init__(self):
        self.state = ["random", 0]

    def manual_seed(self, number):
        self.state = [number, 0]

    def get_state(self):
        return list(self.state)

    def set_state(self, state):
        self.state = list(state)

    def draw(self):
        self.state[1] += 1
        return tuple(self.state)


class cuda:
    default_generators = ()
    queued = []

    @staticmethod
    def is_initialized():
        return bool(cuda.default_generators)

    @staticmethod
    def _lazy_call(call):
        cuda.queued.append(call)

    @staticmethod
    def init():
        cuda.default_generators = (Generator(), Generator())
        for call in cuda.queued:
            call()


default_generator = Generator()
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch that can be imported, and is not yet."""
    (tmp_path / "torch.py").write_text(STAND_IN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, _Finder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    had = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}
    importlib.invalidate_caches()
    yield
    sys.modules.pop("torch", None)
    sys.modules.update(had)


@pytest.fixture
def seeds() -> Iterator[Seeds]:
    restore = kept_random_state()
    yield Seeds(lambda number: None)
    restore()


def begin(seeds: Seeds, seed: int, run: RunId, replica: int) -> None:
    seeds.begin(Streams(seed, "m.step", run[0], replica, run[1:]))


def imported() -> Any:
    return importlib.import_module("torch")


def test_every_run_and_replica_has_numbers_of_its_own(seeds: Seeds) -> None:
    torch, drawn = imported(), []
    for case in [(7, (5,), 1), (8, (5,), 1), (7, (6,), 1), (7, (5,), 0), (7, (5, 2, 0), 1), (7, (5,), 1)]:
        begin(seeds, *case)
        drawn.append(torch.default_generator.draw())
    assert len(set(drawn)) == 5
    assert drawn[0] == drawn[-1]
    assert all(0 <= number < 1 << 64 and count == 1 for number, count in drawn)


def test_a_run_that_imports_torch_draws_as_one_that_had_it(seeds: Seeds) -> None:
    begin(seeds, 7, (5,), 1)
    first = imported().default_generator.draw()
    assert not any(isinstance(finder, _Finder) for finder in sys.meta_path)
    begin(seeds, 7, (5,), 1)
    assert imported().default_generator.draw() == first


def test_torch_is_never_imported(seeds: Seeds) -> None:
    begin(seeds, 7, (5,), 1)
    kept_random_state()()
    assert "torch" not in sys.modules


def test_find_spec_finds_torch_and_seeds_nothing(seeds: Seeds) -> None:
    begin(seeds, 7, (5,), 1)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.endswith("torch.py")
    wanted = imported().default_generator.draw()
    assert wanted[0] != "random"


def test_an_import_that_fails_is_seeded_when_it_succeeds(seeds: Seeds, tmp_path: Path) -> None:
    begin(seeds, 7, (5,), 1)
    (tmp_path / "torch.py").write_text("raise OSError('no memory')")
    with pytest.raises(OSError, match="no memory"):
        imported()
    (tmp_path / "torch.py").write_text(STAND_IN)
    importlib.invalidate_caches()
    first = imported().default_generator.draw()
    begin(seeds, 7, (5,), 1)
    assert imported().default_generator.draw() == first


def test_cuda_is_seeded_when_it_starts_and_is_not_started(seeds: Seeds) -> None:
    torch = imported()
    for number in range(3):
        begin(seeds, 7, (number,), 1)
    assert not torch.cuda.is_initialized()
    assert len(torch.cuda.queued) == 1
    torch.cuda.init()
    late = [generator.draw() for generator in torch.cuda.default_generators]
    begin(seeds, 7, (2,), 1)
    assert [generator.draw() for generator in torch.cuda.default_generators] == late


def test_states_are_kept_around_a_nested_run(seeds: Seeds) -> None:
    torch = imported()
    torch.cuda.init()
    generators = [torch.default_generator, *torch.cuda.default_generators]
    begin(seeds, 7, (5,), 0)
    [generator.draw() for generator in generators]
    restore = kept_random_state()
    wanted = [generator.draw() for generator in generators]
    restore()
    begin(seeds, 7, (5, 0, 0), 0)
    [generator.draw() for generator in generators]
    restore()
    assert [generator.draw() for generator in generators] == wanted


def test_the_run_around_one_that_imports_torch_draws_its_own(seeds: Seeds) -> None:
    begin(seeds, 7, (5,), 0)
    restore = kept_random_state()
    begin(seeds, 7, (5, 0, 0), 0)
    nested = imported().default_generator.draw()
    imported().cuda.init()
    restore()
    drawn = [generator.draw() for generator in (imported().default_generator, *imported().cuda.default_generators)]
    begin(seeds, 7, (5,), 0)
    again = [generator.draw() for generator in (imported().default_generator, *imported().cuda.default_generators)]
    assert drawn == again
    assert nested not in drawn


def test_the_scripts_own_is_left_alone_where_replicas_are_its_threads(seeds: Seeds) -> None:
    torch = imported()
    torch.default_generator.manual_seed(99)
    torch.default_generator.draw()
    restore = kept_random_state()
    begin(seeds, 7, (5,), 0)
    torch.default_generator.draw()
    restore()
    assert torch.default_generator.draw() == (99, 2)


def test_one_finder_for_the_process(seeds: Seeds) -> None:
    Seeds(random.seed)
    GENERATORS.watch()
    assert len([finder for finder in sys.meta_path if isinstance(finder, _Finder)]) == 1
