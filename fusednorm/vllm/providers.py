"""Providers of vLLM's operations ``rms_norm`` and ``fused_add_rms_norm``, in vLLM's IR."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.engine.choose import use_backend
from fusednorm.operations import norm
from fusednorm.vllm import roundings

#: The providers, by the contract whose norms they have (``roundings.py``); the first is vLLM's native implementation's.
BY_CONTRACT = {"vllm": "fusednorm", "default": "fusednorm_default", "huggingface": "fusednorm_huggingface"}
AS_VLLM = BY_CONTRACT["vllm"]

#: Where the sum and the normalised row are rounded, by the provider.
ROUNDINGS = {provider: roundings.of(contract)["norm"] for contract, provider in BY_CONTRACT.items()}

_PARAMETERS = {
    "rms_norm": ["x", "weight", "epsilon", "variance_size"],
    "fused_add_rms_norm": ["x", "x_residual", "weight", "epsilon", "variance_size"],
}


def add(vllms: Any) -> None:
    """Adds the providers to vLLM's two operations, ``vllm.ir.ops``."""
    for provider, flags in ROUNDINGS.items():
        rms_norm, fused_add_rms_norm = implementations(**flags)
        vllms.rms_norm.register_impl(provider, supports_args=takes_norm)(rms_norm)
        vllms.fused_add_rms_norm.register_impl(provider, supports_args=takes_fused, inplace=True)(fused_add_rms_norm)


def implementations(
    round_sum: bool, round_norm: bool
) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """vLLM's ``rms_norm`` and ``fused_add_rms_norm`` (the second in place), computed by fusednorm.

    Args:
        round_sum: normalise the rounded sum. vLLM's native implementation normalises the unrounded one.
        round_norm: round the normalised row to the weight's dtype, as vLLM's native implementation does.
    """

    def rounds(x: Tensor, weight: Tensor | None) -> bool:
        return round_norm and weight is not None and weight.dtype == x.dtype

    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        return norm.rms_norm(x, weight, epsilon, round_norm=rounds(x, weight))

    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return norm.fused_add_rms_norm_(
            x, x_residual, weight, epsilon, round_sum=round_sum, round_norm=rounds(x, weight)
        )

    return rms_norm, fused_add_rms_norm


def takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether fusednorm can round as vLLM's native ``rms_norm``; if not, vLLM takes the next provider.

    It cannot where vLLM computes float64 rows in float32, where it rounds the normalised row to a weight's dtype that
    is neither x's nor float32, and where it takes the mean of squares of a part of the row.
    """
    return (
        variance_size is None
        and x.dtype in NARROW_FLOATS
        and (weight is None or (weight.dtype in (x.dtype, torch.float32) and weight.shape == x.shape[-1:]))
    )


def takes_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether fusednorm takes ``fused_add_rms_norm``. It is in place, so both operands must be contiguous."""
    return (
        takes_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def unexpected(vllms: Any, priorities: Any, platform: Any) -> str:
    """The first difference between this vLLM and the tested one; empty without a difference."""
    fields = {field.name for field in dataclasses.fields(priorities)} if dataclasses.is_dataclass(priorities) else set()
    if not fields.issuperset(_PARAMETERS):
        return f"expected IrOpPriorityConfig to be a dataclass with the fields {', '.join(_PARAMETERS)}"
    for attribute in ("get_default_ir_op_priority", "import_ir_kernels", "device_type"):
        if not hasattr(platform, attribute):
            return f"expected {platform.__name__} to have {attribute}"
    for name, expected in _PARAMETERS.items():
        op: Any = getattr(vllms, name, None)
        if not hasattr(op, "register_impl") or "native" not in getattr(op, "impls", {}):
            return f"expected vllm.ir.ops.{name} to have register_impl and an implementation named native"
        found = list(inspect.signature(op.impls["native"].impl_fn).parameters)
        if found != expected:
            return f"expected vllm.ir.ops.{name} to take {', '.join(expected)}, found {', '.join(found)}"
    with use_backend("reference"):  # the user's requested backend may not take CPU tensors
        alike = _rounds_as_known(vllms)
    if not alike:
        return "its native RMSNorm does not round where it did in the version tested"
    return ""


def _rounds_as_known(vllms: Any) -> bool:
    """Whether vLLM's native implementation rounds at the places of the provider ``AS_VLLM``, in a few rows.

    ``epsilon`` is a power of 4, so large that the mean of squares does not change it. So rstd is exactly a power of 2,
    in any computation, and only the places of rounding can differ. A normalised float16 row is then subnormal, so its
    rounding loses bits.
    """
    x = torch.arange(1024, 2048, device="cpu").half() / 1024
    residual, weight, epsilon = x.flip(0) / 64, x.roll(500), 2.0**30
    rms_norm, fused_add_rms_norm = implementations(**ROUNDINGS[AS_VLLM])
    for w in (weight, weight.float(), None):
        theirs = vllms.fused_add_rms_norm.impls["native"].impl_fn(x, residual, w, epsilon)
        ours = fused_add_rms_norm(x.clone(), residual.clone(), w, epsilon)
        if not all(map(torch.equal, theirs, ours)):
            return False
        if not torch.equal(vllms.rms_norm.impls["native"].impl_fn(x, w, epsilon), rms_norm(x, w, epsilon)):
            return False
    return True


def prefer(contract: str, platform: Any, key: str) -> None:
    """Puts a contract's provider into the platform's default order, which vLLM appends to the user's.

    With vLLM's rounding the provider comes just before the native implementation, because implementations that the
    platform prefers may round differently. With another rounding it comes first.

    Args:
        contract: whose norms the provider has.
        platform: vLLM's.
        key: what else decides vLLM's compiled code. vLLM keeps that code by its configuration, of which this becomes a
            part.
    """
    platforms_own = platform.get_default_ir_op_priority

    def get_default_ir_op_priority(cls: Any, vllm_config: Any) -> Any:
        priorities = platforms_own(vllm_config)
        additional = getattr(vllm_config, "additional_config", None)
        if isinstance(additional, dict):
            additional["fusednorm"] = key
        provider = provider_of(roundings.of_model(contract, vllm_config))
        for name in _PARAMETERS:
            order = list(getattr(priorities, name))
            order.insert(order.index("native") if provider == AS_VLLM and "native" in order else 0, provider)
            setattr(priorities, name, order)
        return priorities

    platform.get_default_ir_op_priority = classmethod(get_default_ir_op_priority)


def provider_of(model: roundings.Roundings) -> str:
    """The provider that rounds as a model's norms."""
    return next(provider for provider, flags in ROUNDINGS.items() if flags == model["norm"])
