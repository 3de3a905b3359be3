"""A GPU on the CPU, which executes the PTX of the GPU backends; tests/machines/emulation/ptx starts Python for it."""
