"""Times fusednorm, its peers and a copy on this machine: ``python -m fusednorm bench``.

``workloads`` lists the operations, ``peers`` the implementations; ``cells`` times them and ``plots`` draws; ``compare``
measures their errors, and ``train`` trains a small language model with each norm.
"""
