"""Kernels in Triton's language: those for CPUs begin with ``cpu_``, and share ``numbers``, ``scales`` and ``gates``."""
