"""A plug-in of pytest, which tests/machines/emulation/ptx names: a GPU backend's kernels run in the machine."""

import importlib
import os

stand_in = importlib.import_module(f"ptx.{os.environ['FUSEDNORM_BACKEND']}")
stand_in.install(int(os.environ["FUSEDNORM_EMULATED_SM"]))
