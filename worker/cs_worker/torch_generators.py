"""torch's random generators, the CPU's and those of all CUDA devices, where the user's code has torch.

The worker never imports torch. Where it is loaded, its generators are seeded as the others are. Where the function of
a run is the first to import it, they are seeded at the end of that import: a worker that repeats a run draws what the
worker before it drew, whichever of the two had torch already. Generators of a CUDA that is not in use yet are seeded
when torch starts it; nothing here does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["GENERATORS", "TorchGenerators"]


class TorchGenerators:
    """They belong to the process, so there is one of this; only who runs the user's code uses it."""

    def __init__(self) -> None:
        # What they are seeded with where they appear now; None: nobody has seeded any.
        self._number: int | None = None
        self._cuda: Any = None  # torch.cuda, once it seeds its generators when it starts

    def seed(self, number: int) -> None:
        """Seed those that there are, and those that appear before this is called again, with 64 bits."""
        self._number = number
        torch = self._loaded()
        if torch is not None:
            torch.default_generator.manual_seed(number)
            if self._cuda.is_initialized():
                self._seed_cuda()

    def keep(self) -> Callable[[], None]:
        """Remember their states; the answer puts them back. Those that appear in between are seeded then with what
        they would have been."""
        number, torch = self._number, self._loaded()
        cpu = None if torch is None else torch.default_generator.get_state()
        cuda = None
        if torch is not None and self._cuda.is_initialized():
            cuda = [generator.get_state() for generator in self._cuda.default_generators]

        def restore() -> None:
            self._number = number
            torch = self._loaded()
            if torch is None:
                return
            if cpu is not None:
                torch.default_generator.set_state(cpu)
            elif number is not None:
                torch.default_generator.manual_seed(number)
            if cuda is not None:
                for generator, state in zip(self._cuda.default_generators, cuda, strict=True):
                    generator.set_state(state)
            elif self._cuda.is_initialized():
                self._seed_cuda()

        return restore

    def watch(self) -> None:
        """See to it that torch's generators are seeded when it is imported."""
        if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self))

    def appeared(self) -> None:
        """torch has been imported."""
        torch = self._loaded()
        if torch is not None and self._number is not None:
            torch.default_generator.manual_seed(self._number)

    def _loaded(self) -> Any:
        """torch, if it has been imported to the end."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "default_generator") or not hasattr(torch, "cuda"):
            return None
        if self._cuda is not torch.cuda:
            self._cuda = torch.cuda
            # torch.cuda.manual_seed_all would wait for the start of CUDA, too, but takes 0.1 ms at every run till then.
            torch.cuda._lazy_call(self._seed_cuda)  # noqa: SLF001
        return torch

    def _seed_cuda(self) -> None:
        if self._number is not None:
            for generator in self._cuda.default_generators:
                generator.manual_seed(self._number)


GENERATORS = TorchGenerators()


class _Finder:
    """Finds torch as the finders behind it do, and tells when it has been imported; then it is of no use any more."""

    def __init__(self, generators: TorchGenerators) -> None:
        self._generators = generators

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._have_it_tell(spec.loader)
        return spec

    def _have_it_tell(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            del loader.exec_module  # what else wants the loader gets it as it was
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._generators.appeared()

        loader.exec_module = execute_and_tell
