"""The compiler of kernels: what it raises."""

from cupy._machine import CompileException

__all__ = ["CompileException"]
