"""A GPU on the CPU, which executes the PTX that the GPU backends launch; tests/emulation/ptx starts Python for it."""
