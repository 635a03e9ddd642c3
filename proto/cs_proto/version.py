"""The version of the project, which pyproject.toml reads here."""

__all__ = ["__version__"]

__version__ = "0.1.0"
