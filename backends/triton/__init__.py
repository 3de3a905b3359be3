"""Triton's kernels, and the backends ``triton`` and ``triton_cpu``, which compile and launch them."""
