"""The conformance kit's plug-in, which pyproject.toml names, serves these tests too: its matrix, its comparisons."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
