"""ONNX: exports of models that call fusednorm.

>>> import fusednorm.onnx
>>> fusednorm.onnx.export(model, (x,), "model.onnx")

``torch.onnx.export`` translates a graph operation by operation. :func:`translations` has the operations of
``torch.ops.fusednorm``, and :func:`export` passes it. Each translation rounds where the operation rounds. By default
ONNX's own RMSNormalization and Sigmoid compute norms and gates, in the order of additions of the runtime. With
``exact=True`` norms and gates consist of additions, products, quotients, roots and conversions, in the order of the
specification: a runtime that rounds these as IEEE 754 says returns fusednorm's bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusednorm.onnx_limits import OPSET, UntranslatedError
from fusednorm.torch_ops.registered import exported

__all__ = ["export", "translations"]

#: The operations that have a translation: functions of ``onnx_operators.py``.
_TRANSLATED = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "fused_add_layer_norm",
    "add",
    "scale",
    "affine",
    "rotate",
    "gate",
    "gelu",
    "relu2",
    "softcap",
    "quantize",
)

#: They take the place of operations that write to their operands.
_INSTEAD = {f"{name}_": name for name in ("rms_norm", "fused_add_rms_norm", "layer_norm", "fused_add_layer_norm")}
_INSTEAD |= {"into": "the function without `out`"}


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    opset_version: int = OPSET,
    exact: bool = False,
    custom_translation_table: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """``torch.onnx.export(..., dynamo=True)`` for a model that calls fusednorm.

    Args:
        model: the model, or what ``torch.export.export`` returned for it.
        args: its positional arguments, of any shapes that the model takes.
        f: the file to write to; None writes nothing.
        kwargs: its arguments by name.
        dynamic_shapes: as ``torch.export.export`` takes them.
        opset_version: of ONNX's operators; 23 or later, or 18 or later with ``exact=True`` (19 or later where numbers
            are float8).
        exact: see :func:`translations`.
        custom_translation_table: other translations, beside fusednorm's and before them.
        **options: see ``torch.onnx.export``.

    Returns:
        The program, whose ``save`` writes a file.

    Raises:
        ImportError: onnxscript is not installed.
        NotImplementedError: the model calls an operation that has no translation, as those that write to their
            operands; or ``opset_version`` is too low for one.
        torch.onnx.OnnxExporterError: torch cannot translate the model.
    """
    if isinstance(model, torch.export.ExportedProgram):
        program = model
    else:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            for called in (node.target, *node.args[:1]):  # torch's own wrapper of what writes has it as an argument
                if isinstance(called, torch._ops.OpOverload) and called.namespace == "fusednorm":
                    _check_translated(called._opname)
    options["custom_translation_table"] = {**translations(exact=exact), **(custom_translation_table or {})}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own code copies what it deprecates
            found = torch.onnx.export(program, (), f, dynamo=True, opset_version=opset_version, **options)
    except torch.onnx.OnnxExporterError as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, UntranslatedError):
            reason = reason.__cause__
        if reason is None:
            raise
        raise reason from None
    assert found is not None
    return found


def translations(*, exact: bool = False) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` of ``torch.onnx.export`` for the operations of ``torch.ops.fusednorm``.

    Pass ``dynamo=True`` and ``opset_version=23`` or later with it; with ``exact=True`` 18 or later.

    Args:
        exact: False: ONNX's RMSNormalization computes norms, and ONNX's Sigmoid gates (plain operators compute norms of
            float64 rows, because RMSNormalization has an epsilon of float32). True: plain operators compute both in the
            order of the specification, with its bits if the runtime computes ``+ - * /``, roots and conversions as IEEE
            754 says. The sum of a norm is then twenty operators and more, which take longer, and rows have a fixed
            length.

    Returns:
        A function for each operation, by the operation; those of gradients, those that write to their operands,
        log-probabilities, ``modulate``, ``linear`` and attention raise NotImplementedError.

    Raises:
        ImportError: onnxscript is not installed.
    """
    try:
        from fusednorm import onnx_operators
    except ModuleNotFoundError as error:
        raise ImportError(f"fusednorm.onnx needs onnxscript ({error}): pip install 'fusednorm[onnx]'") from error
    translated = {name: _translation(name, getattr(onnx_operators, name, None), exact) for name in exported()}
    return {getattr(torch.ops.fusednorm, name).default: function for name, function in translated.items()}


def _translation(name: str, function: Any, exact: bool) -> Callable[..., Any]:
    """A function that torch accepts: with a name, and without types, which it would take for those of ONNX."""

    def translation(*arguments: Any) -> Any:
        _check_translated(name)
        return function(exact, *arguments)

    translation.__name__ = name
    return translation


def _check_translated(name: str) -> None:
    if name in _TRANSLATED:
        return
    why = "none has been written; in the model that is exported, call torch's operations in its place"
    if name.endswith("backward"):
        why = "it computes gradients; export the forward pass of the model"
    elif name in _INSTEAD:
        why = f"it writes to its operands; in the model call {_INSTEAD[name]}, which returns new tensors"
    raise UntranslatedError(f"torch.ops.fusednorm.{name} has no translation to ONNX, because {why}")
