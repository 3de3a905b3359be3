"""Limits of exports to ONNX, which ``onnx.py`` and ``onnx_operators.py`` share."""

#: The first version of ONNX's operators that has RMSNormalization.
OPSET = 23


class UntranslatedError(NotImplementedError):
    """A call has no translation, for the reason in the message."""
