"""Whether two runs agree: the contract of a model, and the difference of two runs."""
