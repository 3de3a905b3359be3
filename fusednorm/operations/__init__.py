"""The functions and modules that users call."""
