"""The version. Only pyproject.toml has its number."""

from importlib.metadata import version

__version__ = version("fusednorm")
