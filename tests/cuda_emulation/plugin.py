"""A plug-in of pytest, which tests/emulation/cuda names: the kernels of the cuda backend run on the CPU."""

import os

import torch

from fusednorm import quick
from fusednorm.backends import cuda

from cuda_emulation import bindings

bindings.install(cuda, quick, torch, int(os.environ["FUSEDNORM_EMULATED_SM"]))
