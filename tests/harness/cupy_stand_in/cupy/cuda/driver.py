"""CUDA's driver calls as far as they are used: what they raise."""

from cupy._machine import CUDADriverError

__all__ = ["CUDADriverError"]
