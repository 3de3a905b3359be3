"""The functions as modules, with a trainable weight."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, cast

import torch
from torch import Size, Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fusednorm.calls.checks import check_activation, check_dense, check_group_size, refuse_type
from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
from fusednorm.operations.linear import linear
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated


def machine_epsilon(x: Tensor) -> float:
    """The machine epsilon of the accumulator type, torch's ``eps`` on a CPU: 2^-23, or 2^-52 for a float64 x."""
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


def as_rows(x: Tensor, normalized_shape: tuple[int, ...], name: str = "x") -> Tensor:
    """Returns x, [..., *normalized_shape], as [..., N], with the normalised dimensions joined into one.

    Raises:
        TypeError: x is no tensor. The messages call x ``name``.
        ValueError: x does not end in these dimensions, or there are none.
    """
    if not isinstance(x, (Tensor, torch.fx.Proxy)):
        refuse_type(name, x)
    if isinstance(x, Tensor):
        check_dense(name, x)
    dimensions = len(normalized_shape)
    if isinstance(x, Tensor) and (not dimensions or not _ends_in(x, normalized_shape)):
        raise ValueError(
            f"{name} must end in the dimensions {list(normalized_shape)}, the normalized_shape (of at least one "
            f"dimension); got shape {list(x.shape)}"
        )
    return x if dimensions == 1 else x.flatten(-dimensions)


def _ends_in(x: Tensor, dimensions: tuple[int, ...]) -> bool:
    if not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return x.shape[-len(dimensions) :] == dimensions
    with warnings.catch_warnings():  # the trace holds for these dimensions only; so does the module
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return [int(n) for n in x.shape[-len(dimensions) :]] == list(dimensions)


def _one_node(module: torch.nn.Module, *inputs: object) -> Any:
    """Adds the call to the graph that ``torch.fx`` traces, as one node; returns None if nothing is traced."""
    for value in inputs:
        if isinstance(value, torch.fx.Proxy):
            tracer: Any = value.tracer
            if tracer.root is not module:
                return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})
    return None


def as_row(weight: Tensor | None, normalized_shape: tuple[int, ...], name: str = "weight") -> Tensor | None:
    """Returns the weight, of ``normalized_shape``, as [N]; messages call it ``name``.

    Raises:
        ValueError: it has another shape.
    """
    if weight is None or (len(normalized_shape) == 1 and not (isinstance(weight, Tensor) and weight.dim() != 1)):
        return weight
    if not isinstance(weight, Tensor):
        refuse_type(name, weight, "torch.as_tensor makes one")
    check_dense(name, weight)
    if weight.shape != normalized_shape:
        raise ValueError(
            f"{name} must have the normalized_shape {list(normalized_shape)}, got shape {list(weight.shape)}"
        )
    return weight.reshape(-1)


class _Norm(torch.nn.Module):
    """The part of modules of norms that knows flags and shapes."""

    #: The function that computes the rows, and its flags, with the values that need not be shown.
    _function: ClassVar[str]
    _flags: ClassVar[dict[str, Any]] = {"weight_offset": 0.0, "round_norm": False}
    normalized_shape: tuple[int, ...]

    def extra_repr(self) -> str:
        """The arguments as torch's module shows them, and fusednorm's own where they are not the default."""
        given = {name: getattr(self, name) for name in self._flags}
        added = [f"{name}={value!r}" for name, value in given.items() if value != self._flags[name]]
        return ", ".join([super().extra_repr(), *added])

    def _of_shape(self, rows: Tensor) -> Tensor:
        """Splits rows into the normalised dimensions again."""
        return rows if len(self.normalized_shape) == 1 else torch.unflatten(rows, -1, self.normalized_shape)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: the functions that rows of this dtype are passed to, and their arguments."""
        return [(self._function, {name: getattr(self, name) for name in ("eps", *self._flags)})]


class _AddNorm(_Norm):
    """The part of modules that take a residual."""

    _flags: ClassVar[dict[str, Any]] = {**_Norm._flags, "round_sum": True}

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
        """Registers a hook. One that returns fewer inputs than it was given raises: it would drop the residual.

        ``torch.distributed.tensor.parallel.SequenceParallel`` registers such a hook.
        """
        if not options.get("with_kwargs"):
            hook = partial(_with_every_input, hook)
        return super().register_forward_pre_hook(hook, **options)


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with fusednorm's bits: same arguments, same state_dict.

    Args:
        normalized_shape: N, or the last dimensions of the input, which are normalised together.
        eps: added to the mean of squares; None means the machine epsilon of the accumulator type, as in torch on a
            CPU: 2^-23, or 2^-52 for a float64 input.
        elementwise_affine: whether there is a weight, initially of ones.
        device: of the weight.
        dtype: of the weight.
        weight_offset: added to the weight; 1.0 is Gemma's ``1 + weight`` (the weight is then initially zero).
        round_norm: round the normalised row to the input's dtype before it is multiplied by the weight, as in Hugging
            Face's Llama.
    """

    _function = "rms_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_norm: bool = False,
    ) -> None:
        self.weight_offset, self.round_norm = float(weight_offset), round_norm
        shape = int(normalized_shape) if isinstance(normalized_shape, int | Integral) else tuple(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to 1 - weight_offset, which multiplies by one."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, ``[..., *normalized_shape]``; the result has x's dtype."""
        if not isinstance(x, Tensor) and (node := _one_node(self, x)) is not None:
            return cast(Tensor, node)
        y = rms_norm(
            as_rows(x, self.normalized_shape),
            as_row(self.weight, self.normalized_shape),
            self._eps(x),
            weight_offset=self.weight_offset,
            round_norm=self.round_norm,
        )
        return self._of_shape(y)

    def _eps(self, x: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        if isinstance(x, torch.fx.Proxy):  # its dtype is known only when the graph runs
            return cast(float, x.tracer.create_proxy("call_function", machine_epsilon, (x,), {}))
        return machine_epsilon(x)


class AddRMSNorm(_AddNorm, RMSNorm):
    """Adds the residual, then normalises: ``y, residual = norm(x, residual)``.

    The residual stream keeps its dtype. The arguments are those of :class:`RMSNorm`, and:

    Args:
        round_sum: normalise the sum after it is rounded to the residual's dtype (True), or before (False).
    """

    _function = "fused_add_rms_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_sum: bool = True,
        round_norm: bool = False,
    ) -> None:
        self.round_sum = round_sum
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, round_norm=round_norm
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the normalised sum, and the sum. Without a residual, where the stream begins, the sum is x itself.

        Args:
            x: ``[..., *normalized_shape]``.
            residual: x's shape, or None.
        """
        if not isinstance(x, Tensor) and (node := _one_node(self, x, residual)) is not None:
            return cast(tuple[Tensor, Tensor], node)
        if residual is None:
            return super().forward(x), x
        y, total = fused_add_rms_norm(
            as_rows(x, self.normalized_shape),
            as_rows(residual, self.normalized_shape, "residual"),
            as_row(self.weight, self.normalized_shape),
            self._eps(x),
            weight_offset=self.weight_offset,
            round_sum=self.round_sum,
            round_norm=self.round_norm,
        )
        return self._of_shape(y), self._of_shape(total)


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` with fusednorm's bits: same arguments, same state_dict.

    Args:
        normalized_shape: N, or the last dimensions of the input, which are normalised together.
        eps: added to the variance.
        elementwise_affine: whether there is a weight, initially of ones.
        bias: whether there is a bias beside the weight, initially of zeros.
        device: of both.
        dtype: of both.
        weight_offset: added to the weight, which is then initially ``1 - weight_offset``.
        round_norm: round the normalised row to the input's dtype before it is multiplied by the weight.
    """

    _function = "layer_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_norm: bool = False,
    ) -> None:
        self.weight_offset, self.round_norm = float(weight_offset), round_norm
        shape = int(normalized_shape) if isinstance(normalized_shape, int | Integral) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to 1 - weight_offset, which multiplies by one, and the bias to 0."""
        super().reset_parameters()
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, ``[..., *normalized_shape]``; the result has x's dtype."""
        if not isinstance(x, Tensor) and (node := _one_node(self, x)) is not None:
            return cast(Tensor, node)
        rows, weight, bias = as_rows(x, self.normalized_shape), *self._affine()
        flags = {"weight_offset": self.weight_offset, "round_norm": self.round_norm}
        return self._of_shape(layer_norm(rows, weight, bias, self.eps, **cast(Any, flags)))

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """The weight and the bias, [N]."""
        return as_row(self.weight, self.normalized_shape), as_row(self.bias, self.normalized_shape, "bias")


class AddLayerNorm(_AddNorm, LayerNorm):
    """Adds the residual, then layer-normalises: ``y, residual = norm(x, residual)``.

    The residual stream keeps its dtype. The arguments are those of :class:`LayerNorm`, and:

    Args:
        round_sum: normalise the sum after it is rounded to the residual's dtype (True), or before (False).
    """

    _function = "fused_add_layer_norm"

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_sum: bool = True,
        round_norm: bool = False,
    ) -> None:
        self.round_sum = round_sum
        flags = {"weight_offset": weight_offset, "round_norm": round_norm}
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, **cast(Any, flags))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the normalised sum, and the sum; see :meth:`AddRMSNorm.forward`."""
        if not isinstance(x, Tensor) and (node := _one_node(self, x, residual)) is not None:
            return cast(tuple[Tensor, Tensor], node)
        if residual is None:
            return super().forward(x), x
        rows = as_rows(x, self.normalized_shape), as_rows(residual, self.normalized_shape, "residual")
        flags = {name: getattr(self, name) for name in self._flags}
        y, total = fused_add_layer_norm(*rows, *self._affine(), self.eps, **flags)
        return self._of_shape(y), self._of_shape(total)


class RMSNormGated(RMSNorm):
    """Normalises and gates: ``norm(x, gate)``, as Mamba 2, Qwen3-Next and Kimi do.

    The arguments are those of :class:`RMSNorm`, and those of :func:`fusednorm.rms_norm_gated`. ``fusednorm.compat`` has
    the modules of mamba_ssm, FLA and Hugging Face's transformers, with their arguments and roundings.

    Args:
        group_size: the elements that are normalised together; None: all.
        norm_before_gate: whether the norm comes first; else the gated x is normalised.
        activation: "silu", "sigmoid", "gelu_tanh", "gelu" or "relu2".
        between: the dtype to which normalised rows are rounded before they meet the gate; x's if None, or
            ``torch.float32``.

    Raises:
        ValueError: there is no such activation, or ``group_size`` does not divide the elements of a row.
    """

    _function = "rms_norm_gated"
    _flags: ClassVar[dict[str, Any]] = {
        **RMSNorm._flags,
        "group_size": None,
        "norm_before_gate": True,
        "activation": "silu",
        "between": None,
    }

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = "silu",
        round_norm: bool = False,
        between: torch.dtype | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        check_activation(activation)  # raises here, not in the first step
        self.group_size, self.norm_before_gate = group_size, norm_before_gate
        self.activation, self.between = activation, between
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, round_norm=round_norm
        )
        check_group_size(group_size, math.prod(self.normalized_shape))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalises x and multiplies it by the function of the gate; the result has x's dtype.

        Args:
            x: ``[..., *normalized_shape]``.
            gate: x's shape.
        """
        if not isinstance(x, Tensor) and (node := _one_node(self, x, gate)) is not None:
            return cast(Tensor, node)
        y = rms_norm_gated(
            as_rows(x, self.normalized_shape),
            as_rows(gate, self.normalized_shape, "gate"),
            as_row(self.weight, self.normalized_shape),
            self._eps(x),
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
            round_norm=self.round_norm,
            between=self.between,
            weight_offset=self.weight_offset,
        )
        return self._of_shape(y)


#: Whether there is autocast on any device, which torch tells sooner than that of one device.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def as_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The operands of a product, converted to autocast's dtype where that is on for the device of x.

    As torch does before its own products: float64, and what has no floating point, stays.
    """
    operands = x, *others
    if (
        not any_autocast()
        or not isinstance(x, Tensor)
        or x.dtype == torch.float64
        or not torch.is_autocast_enabled(x.device.type)
    ):
        return operands
    to = torch.get_autocast_dtype(x.device.type)
    stays = (torch.float64, to)
    return tuple(t if t is None or t.dtype in stays or not t.is_floating_point() else t.to(to) for t in operands)


def check_linear(module: Any) -> None:
    """Raises TypeError unless a module multiplies by its weight as a ``torch.nn.Linear`` does."""
    known = torch.nn.Linear.forward, Linear.forward
    if not isinstance(module, torch.nn.Linear) or type(module).forward not in known:
        raise TypeError(
            "module must be a torch.nn.Linear with torch's forward pass, whose product is that of its weight; got "
            f"{type(module).__name__}"
        )


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` by :func:`fusednorm.linear`: same arguments, same state_dict.

    Under autocast operands are converted first, as torch converts them.

    Args:
        in_features: K, the length of rows.
        out_features: N, the length of rows of the result.
        bias: whether there is a bias.
        device: of weight and bias.
        dtype: of both.
    """

    @classmethod
    def from_linear(cls, module: torch.nn.Linear) -> Linear:
        """A module with the weight and the bias of another one: the same parameters, no copies.

        It has the other one's training mode, and none of its hooks.

        Args:
            module: a ``torch.nn.Linear``, or of a subclass with its forward pass.

        Raises:
            TypeError: it is no such module.
            ValueError: its weight is no parameter of its own, or has no shape yet.
        """
        check_linear(module)
        weight = module._parameters.get("weight")
        if weight is None or is_lazy(weight):
            raise ValueError(
                "module must have a weight with a shape as its own parameter; run a LazyLinear once, and remove "
                "parametrizations (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        made = cls(module.in_features, module.out_features, False, "meta", weight.dtype)
        made.weight, made.bias = module.weight, module.bias
        return made.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """The product of x, ``[..., K]``, and the weight: ``[..., N]``, in x's dtype."""
        if not isinstance(x, Tensor) and (node := _one_node(self, x)) is not None:
            return cast(Tensor, node)
        return linear(*as_autocast(x, self.weight, self.bias))

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("linear", {})]


def _with_every_input(hook: Callable[..., Any], module: _AddNorm, inputs: tuple[Any, ...]) -> Any:
    result = hook(module, inputs)
    kept = len(inputs) if result is None else len(result) if isinstance(result, tuple) else 1
    if kept < len(inputs):
        raise RuntimeError(
            f"a forward pre-hook of {type(module).__name__} was given {len(inputs)} inputs and returned {kept}, so the "
            "residual is lost; torch's SequenceParallel is such a hook: use fusednorm.distributed.SequenceParallel "
            "instead"
        )
    return result


for _class in (RMSNorm, AddRMSNorm, RMSNormGated, LayerNorm, AddLayerNorm, Linear):
    _class.__module__ = "fusednorm"  # where users find it, whatever file it lies in: saved models have this name
