"""The version, written once, in pyproject.toml."""

from importlib.metadata import version

__version__ = version("fusednorm")
