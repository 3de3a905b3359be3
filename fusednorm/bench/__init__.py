"""Times fusednorm, its peers and a copy on this machine: ``python -m fusednorm bench``.

``cells`` measures, ``plots`` draws, ``train`` trains a small language model with each norm.
"""
