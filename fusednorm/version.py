"""The version, of which only pyproject.toml has the number, and that of the specification."""

from importlib.metadata import version

__version__ = version("fusednorm")

#: The number of the contract. Bits change only together with it, and with the golden vectors of the tests.
SPEC_VERSION = 1
