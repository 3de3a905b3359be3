"""RMS norms of Hugging Face models, and the additions before them, by fusednorm.

>>> import fusednorm.transformers
>>> report = fusednorm.transformers.patch(model)  # what it did, and why it left anything alone
>>> fusednorm.transformers.unpatch(model)

A norm is replaced if tracing it shows that it computes an RMS norm, whatever it is called (``norms.py``); an addition
is fused with the norm after it if the source of the layer shows that one directly follows the other (``layers.py``).
Each family keeps its own rounding. Weights, names and ``state_dict`` stay as they are.

``use_kernels=True``, transformers' own way, is served by :func:`register_kernels`.
"""

from fusednorm.transformers.hub import register_kernels
from fusednorm.transformers.patching import Counts, Report, patch, unpatch

__all__ = ["Counts", "Report", "patch", "register_kernels", "unpatch"]
