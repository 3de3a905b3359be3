"""A GPU on the CPU, for the tests of csrc/; tests/emulation/cuda starts Python with it."""
