"""RMS norms of Hugging Face models, and the additions before them, by fusednorm.

>>> import fusednorm.transformers
>>> report = fusednorm.transformers.patch(model)  # says what was replaced, and why other modules were not
>>> fusednorm.transformers.unpatch(model)

A norm is replaced if a trace shows that it computes an RMS norm, whatever its name (``norms.py``). An addition is fused
with the norm after it if the source of the layer shows that one directly follows the other (``layers.py``). Each model
family keeps its own rounding. Weights, names and ``state_dict`` do not change.

:func:`register_kernels` adds the norms to transformers' own mechanism, ``use_kernels=True``.
"""

from fusednorm.transformers.hub import register_kernels
from fusednorm.transformers.patching import Counts, Report, patch, unpatch

__all__ = ["Counts", "Report", "patch", "register_kernels", "unpatch"]
