"""torch's default random generators, those of the CPU and of all CUDA devices, if the user's code loads torch.

The worker never imports torch. If torch is loaded, each run seeds its generators. If the function of a run is the first
to import torch, they are seeded at the end of that import: so a worker that repeats a run draws the same numbers as the
worker before it, whichever of the two had loaded torch already. Generators of CUDA are seeded when torch starts CUDA;
nothing here starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["GENERATORS", "TorchGenerators"]


class TorchGenerators:
    """The generators of this process; there is one instance. Only the thread that runs the user's code uses it."""

    def __init__(self) -> None:
        # The seed for generators that appear now; None: no run has seeded any yet.
        self._number: int | None = None
        self._cuda: Any = None  # torch.cuda, once it is told to seed its generators at its start

    def seed(self, number: int) -> None:
        """Seed all generators with ``number`` (64 bits), also those that appear before the next call."""
        self._number = number
        if "torch" in sys.modules and (torch := self._loaded()) is not None:
            torch.default_generator.manual_seed(number)
            if self._cuda.is_initialized():
                self._seed_cuda()

    def keep(self) -> Callable[[], None]:
        """Remember the states of all generators. The result is a function that restores them; it seeds generators that
        appeared in between with the number of this run."""
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
        """Arrange that torch's generators are seeded when torch is imported."""
        if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self))

    def appeared(self) -> None:
        """Seed the generators: torch has been imported."""
        torch = self._loaded()
        if torch is not None and self._number is not None:
            torch.default_generator.manual_seed(self._number)

    def _loaded(self) -> Any:
        """The module torch, if its import is complete; else None."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "default_generator") or not hasattr(torch, "cuda"):
            return None
        if self._cuda is not torch.cuda:
            self._cuda = torch.cuda
            # torch.cuda.manual_seed_all would wait for the start of CUDA, too, but takes 0.1 ms in each run before it.
            torch.cuda._lazy_call(self._seed_cuda)  # noqa: SLF001
        return torch

    def _seed_cuda(self) -> None:
        if self._number is not None:
            for generator in self._cuda.default_generators:
                generator.manual_seed(self._number)


GENERATORS = TorchGenerators()


class _Finder:
    """Finds torch by the finders after it, reports the end of the import, and removes itself."""

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
            del loader.exec_module  # restores the loader's own method
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._generators.appeared()

        loader.exec_module = execute_and_tell
