"""The commands of ``python -m fusednorm``: they look at this machine, and measure and compare implementations."""
