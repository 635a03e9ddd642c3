"""Workers on the nodes of a Ray cluster. The only package that imports Ray, and only in processes that talk to it."""

from .cluster import RayCluster

__all__ = ["RayCluster"]
