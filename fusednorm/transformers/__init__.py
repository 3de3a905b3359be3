"""RMS norms of Hugging Face models, and the steps around them, by fusednorm.

>>> import fusednorm.transformers
>>> report = fusednorm.transformers.patch(model)  # says what was replaced, and why other modules were not
>>> fusednorm.transformers.unpatch(model)

A norm, with a gate or without, is replaced if a trace shows that it computes an RMS norm, whatever its name
(``norms.py``). An addition is fused with the norms around it if the source of the layer shows that they stand side by
side (``layers.py``). q and k are normalised and rotated in one call (``attention.py``), and the activation of an MLP
and its product are one call (``activations.py``). Each model family keeps its own rounding. Weights, names and
``state_dict`` do not change. With ``products=True`` linear layers (``products.py``) and tables of rotations
(``tables.py``) also have the same bits on every processor, and with ``attention=True`` a token's attention
(``attention_function.py``) depends on the tokens that it sees alone.

:func:`quantize` gives a model layers of int8 (``quantizing.py``), whether it is patched or not.

:func:`register_kernels` adds layers to transformers' own mechanism, ``use_kernels=True``; :func:`write_kernel` writes
a folder that it loads.
"""

from fusednorm.transformers.attention_function import register_attention
from fusednorm.transformers.hub import register_kernels, write_kernel
from fusednorm.transformers.patching import Counts, Report, patch, unpatch
from fusednorm.transformers.quantizing import Quantized, quantize, unquantize

__all__ = [
    "Counts",
    "Quantized",
    "Report",
    "patch",
    "quantize",
    "register_attention",
    "register_kernels",
    "unpatch",
    "unquantize",
    "write_kernel",
]
