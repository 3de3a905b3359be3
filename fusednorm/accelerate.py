"""torch's own norms, ``torch.nn.functional.rms_norm``, ``layer_norm`` and their modules, by the ``cpu`` backend.

The code of a Python function is exchanged, and not the function: modules that imported it have it, tables of
overrides still find it, and it is pickled by its name. Its own code stays in ``__wrapped__``, where ``inspect`` and
``torch.jit.script`` look for the source.

``docs/torch.md`` says why the operators below them, ``aten::rms_norm`` and ``aten::layer_norm``, are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter, functional
from torch.overrides import has_torch_function_variadic

from fusednorm.calls import must_be_seen
from fusednorm.calls.checks import check_operands, requires_grad
from fusednorm.calls.fast_path import Entry
from fusednorm.engine.choose import use_backend
from fusednorm.operations import layer_norm, norm
from fusednorm.operations.modules import as_row, as_rows

_CPU = use_backend("cpu")

#: The eps of torch's RMS norm for None, by the dtypes that are taken.
_EPS = {torch.float16: 2.0**-23, torch.bfloat16: 2.0**-23, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
_NARROW = frozenset((torch.float16, torch.bfloat16))

_PLAIN = frozenset((Tensor, Parameter))
_OPERANDS = _PLAIN | {type(None)}
_SHAPES = frozenset((tuple, list, torch.Size))

# Before a shape is looked at: the trace would record that.
_, _is_tracing = must_be_seen.QUESTIONS

_lock = threading.Lock()
_open: set[Acceleration] = set()


class _Norm:
    """A function of ``torch.nn.functional``, and what takes its place. An RMS norm is given no bias.

    Args:
        name: in ``torch.nn.functional``.
        function: of fusednorm.
        center: whether it is the LayerNorm.
        code: in place of torch's.
    """

    _changed: Any  # torch's function
    _torchs: Any  # one of its own code
    _by_torch: Any  # the same, with a bias for an RMS norm too

    def __init__(self, name: str, function: Callable[..., Any], center: bool, code: FunctionType) -> None:
        self._name, self._function, self._center, self._code = name, function, center, code
        self._eps = {} if center else _EPS
        self._on_fast_path = Entry("norm", "x weight bias eps", 0, {"center": center}).open("cpu")

    def compute(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        """The norm, by the fast path if that takes the call."""
        if is_dynamo_compiling() or has_torch_function_variadic(input, weight, bias) or _is_tracing():
            return self._by_torch(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
        # C looks at all else: other types, the dtypes, devices, modes, gradients.
        if type(input) is Tensor and type(weight) in _OPERANDS and type(bias) in _OPERANDS:
            row = weight.shape if weight is not None else () if input.is_nested else input.shape[-1:]
            if (
                type(normalized_shape) in _SHAPES
                and len(row) == 1
                and (normalized_shape == row or normalized_shape == [*row])
                and type(normalized_shape[0]) is int  # torch refuses 8.0
                and (input.ndim < 4 or input.is_contiguous())  # of four and five, torch may keep channels last
                and (not self._center or _have_torchs_dtypes(input, weight, bias))
                and (bias is None or bias.shape == row)
            ):
                number = eps if type(eps) is float else self._eps.get(input.dtype) if eps is None else None
                result: Tensor | None = None if number is None else self._on_fast_path(input, weight, bias, number)
                if result is not None:
                    return result
        return self._beyond_fast_path(input, normalized_shape, weight, bias, eps)

    def _beyond_fast_path(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        """The norm by fusednorm's function, or by torch."""
        if self._is_torchs(input, normalized_shape, weight, bias, eps):
            return self._by_torch(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
        shape = tuple(normalized_shape)
        try:
            rows, of_weight, of_bias = as_rows(input, shape), as_row(weight, shape), as_row(bias, shape)
            for row in (of_weight, of_bias):
                check_operands(rows, None, row, None, None)
        except (TypeError, ValueError):  # torch has a message of its own for it, or takes it
            return self._by_torch(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
        with _CPU:
            of_eps = self._eps[input.dtype] if eps is None else eps
            y: Tensor = self._function(rows, of_weight, bias=of_bias, eps=of_eps)
        return y if len(shape) == 1 else y.view(input.shape)

    def _is_torchs(self, input: object, normalized_shape: object, weight: Any, bias: Any, eps: object) -> bool:
        """Whether a mode, a transform or a tensor must see torch's operator, or an argument is unusual."""
        if any(ask() for ask in must_be_seen.QUESTIONS) or type(input) not in _PLAIN:
            return True
        if type(weight) not in _OPERANDS or type(bias) not in _OPERANDS:
            return True
        if not isinstance(normalized_shape, list | tuple) or any(type(n) is not int for n in normalized_shape):
            return True
        x = cast(Tensor, input)
        return (
            (type(eps) is not float and (eps is not None or self._center))
            or not x.is_cpu
            or x.is_nested
            or x.dtype not in _EPS
            or (x.layout is torch.strided and x.dim() in (4, 5) and not x.is_contiguous())
            or (self._center and (not _have_torchs_dtypes(x, weight, bias) or _records(x, weight, bias)))
            or must_be_seen.transform(x, weight, bias)
        )

    def exchange(self) -> None:
        """Exchanges the code of torch's function."""
        found = self._changed = self.found()
        own = self._torchs = FunctionType(found.__code__, found.__globals__, found.__name__, found.__defaults__)
        update_wrapper(own, found)
        del own.__wrapped__  # type: ignore[attr-defined]
        self._by_torch = own if self._center else lambda x, shape, weight, _, eps: own(x, shape, weight, eps)
        # The name under which the new code finds this norm.
        setattr(functional, f"_fusednorm_{self._name}", self.compute)
        found.__wrapped__ = own  # type: ignore[attr-defined]
        found.__code__ = self._code.__code__

    def found(self) -> FunctionType:
        """Torch's function.

        Raises:
            RuntimeError: it is not torch's own.
        """
        found = getattr(functional, self._name)
        if (
            not isinstance(found, FunctionType)
            or found.__globals__ is not vars(functional)
            or found.__code__.co_varnames[: found.__code__.co_argcount] != self._code.__code__.co_varnames
            or found.__code__.co_freevars
        ):
            raise RuntimeError(
                f"torch.nn.functional.{self._name} must be torch's own, got {found!r}; undo the change of the library "
                "that replaced it first"
            )
        return found

    def undo(self) -> None:
        """Gives torch's function its own code back."""
        self._changed.__code__ = self._torchs.__code__
        del self._changed.__wrapped__
        delattr(functional, f"_fusednorm_{self._name}")


def _have_torchs_dtypes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's LayerNorm takes such operands: all of one dtype, or float32 ones beside rows of 16 bits."""
    of_row = bias if weight is None else weight
    if of_row is None:
        return True
    dtype = of_row.dtype
    if bias is not None and bias.dtype is not dtype:
        return False
    return dtype is x.dtype or (dtype is torch.float32 and x.dtype in _NARROW)


def _records(*operands: Tensor | None) -> bool:
    """Whether gradients are recorded, which takes torch's LayerNorm less time than fusednorm's for few rows."""
    return torch.is_grad_enabled() and requires_grad(*operands)


def _rms_code(input, normalized_shape, weight=None, eps=None):  # type: ignore[no-untyped-def]
    return _fusednorm_rms_norm(input, normalized_shape, weight, None, eps)  # type: ignore[name-defined]  # noqa: F821


def _layer_code(input, normalized_shape, weight=None, bias=None, eps=1e-5):  # type: ignore[no-untyped-def]
    return _fusednorm_layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[name-defined]  # noqa: F821


_NORMS = (
    _Norm("rms_norm", norm.rms_norm, False, cast(FunctionType, _rms_code)),
    _Norm("layer_norm", layer_norm.layer_norm, True, cast(FunctionType, _layer_code)),
)


class Acceleration:
    """The result of :func:`fusednorm.accelerate_torch`: ``with`` it a block of code, or call :meth:`close`."""

    def __repr__(self) -> str:
        return f"<torch's norms by fusednorm: {'in effect' if self in _open else 'closed'}>"

    def close(self) -> None:
        """Undoes this call of :func:`fusednorm.accelerate_torch`; with the last of them torch's own code is back."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    for one in _NORMS:
                        one.undo()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def accelerate_torch() -> Acceleration:
    """Has the ``cpu`` backend compute torch's RMS norm and LayerNorm, functions and modules, until it is undone.

    >>> fusednorm.accelerate_torch()
    >>> with fusednorm.accelerate_torch():  # for a block of code
    ...     model(x)

    The functions are ``rms_norm`` and ``layer_norm`` of ``torch.nn.functional``. Results are those of
    :func:`fusednorm.rms_norm` and :func:`fusednorm.layer_norm` with their default flags, which round where torch
    rounds: once, from float32. Sums alone are taken in another order, so few elements of 16 bits differ, by one unit in
    the last place (``docs/torch.md``). Gradients are those of :func:`fusednorm.rms_norm` too; LayerNorms whose
    gradients are recorded are torch's.

    It holds for the whole process: other threads get the new bits too, so do not call it while they compute. Calls of
    it may be nested or repeated; the last one that is closed undoes it.

    torch itself still computes, with its own bits and errors, whatever is not eager work on plain CPU tensors:
    ``torch.compile``, ``torch.export``, ``torch.jit``, ``torch.func`` (``vmap``, ``grad``, ``jvp``), forward-mode
    differentiation, dispatch modes, subclasses of tensors, other devices (meta tensors among them), sparse, nested and
    complex tensors, channels last, a float64 weight of a narrower input, an eps that is no float, and every call that
    raises. The profiler shows ``fusednorm::rms_norm`` and ``fusednorm::layer_norm``.

    ``torch.rms_norm``, ``torch.layer_norm`` and their operators, called directly or from C++, stay torch's.

    Returns:
        An object that undoes it, by ``close()`` or at the end of a ``with`` block.

    Raises:
        BackendError: the ``cpu`` backend cannot be used here, and why.
        RuntimeError: another library has replaced one of the functions.
    """
    with _CPU:
        norm.rms_norm(torch.zeros(1, 1))  # opens the fast path, or raises
    acceleration = Acceleration()
    with _lock:
        if not _open:
            for one in _NORMS:  # all of them or none
                one.found()
            for one in _NORMS:
                one.exchange()
        _open.add(acceleration)
    return acceleration
