"""How fast fusednorm is on this machine, beside its peers and a copy: ``python -m fusednorm bench``.

``cells`` measures, ``plots`` draws, ``train`` trains a small language model with each norm.
"""
