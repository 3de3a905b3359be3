"""The conformance kit's plug-in, which pyproject.toml names, serves these tests too: its matrix, its comparisons."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "clients")]  # helpers beside the tests
