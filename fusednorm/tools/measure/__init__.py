"""Measures fusednorm, its peers and a copy on this machine: ``python -m fusednorm bench`` and ``compare``.

``workloads`` lists the operations, ``peers`` the implementations. ``bench`` times them by a ``clock``, keeps the
figures in ``cells``, and prints them by ``tables``. ``compare`` measures errors.
"""
