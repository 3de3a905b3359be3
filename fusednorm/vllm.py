"""A plug-in of vLLM: its RMSNorm layers call fusednorm. See ``docs/vllm.md``.

vLLM calls :func:`register` in each of its processes (entry-point group ``vllm.general_plugins``).
"""

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm import ops
from fusednorm.registry import use_backend
from fusednorm.version import __version__

# A child of vLLM's own logger, so vLLM's log shows its messages.
_logger = logging.getLogger("vllm.fusednorm")

#: The values of FUSEDNORM_VLLM, and the provider that vLLM then prefers. ``,gpu`` may follow the first two.
MODES = {"vllm": "fusednorm", "default": "fusednorm_default", "off": None}

_PARAMETERS = {
    "rms_norm": ["x", "weight", "epsilon", "variance_size"],
    "fused_add_rms_norm": ["x", "x_residual", "weight", "epsilon", "variance_size"],
}


def register() -> None:
    """Adds two providers to vLLM's operations ``rms_norm`` and ``fused_add_rms_norm``, and makes vLLM prefer one.

    ``fusednorm`` rounds at the places of vLLM's native implementation, ``fusednorm_default`` as fusednorm does by
    default. The environment variable FUSEDNORM_VLLM chooses: ``vllm`` (also if it is not set), ``default``, or ``off``
    for neither. The user's option ``--ir-op-priority`` overrides it.

    On platforms other than CPUs vLLM prefers neither, unless the variable also says ``gpu``, as in ``vllm,gpu``: the
    kernels for GPUs have not been run on one. This function decides that, through vLLM's order of preference, and not
    ``takes_norm``, because vLLM caches compiled code by that order.

    vLLM does not catch the errors of a plug-in, so this function raises none: if the variable has another value, or
    this version of vLLM is not supported, it logs a warning and leaves vLLM as it was.
    """
    setting = os.environ.get("FUSEDNORM_VLLM", "").strip() or "vllm"
    words = {word.strip() for word in setting.split(",")}
    modes = words - {"gpu"} or {"vllm"}
    if len(modes) > 1 or not modes <= MODES.keys():
        _decline(
            f"FUSEDNORM_VLLM is {setting!r}, it must be one of {', '.join(MODES)}; "
            "with ',gpu' after the first two it holds for GPUs too"
        )
        return
    (mode,) = modes
    if mode == "off":
        _logger.info("fusednorm %s: FUSEDNORM_VLLM=off, vLLM keeps its own RMSNorm", __version__)
        return
    try:
        from vllm.config.kernel import IrOpPriorityConfig
        from vllm.ir import ops as vllms
        from vllm.platforms import current_platform
    except ImportError as error:
        _decline(f"expected vllm.ir.ops and vllm.config.kernel.IrOpPriorityConfig ({error})")
        return
    platform = type(current_platform)
    unexpected = _unexpected(vllms, IrOpPriorityConfig, platform)
    if unexpected:
        _decline(unexpected)
        return
    if "fusednorm" in vllms.rms_norm.impls:
        return
    for provider, as_vllm in (("fusednorm", True), ("fusednorm_default", False)):
        rms_norm, fused_add_rms_norm = implementations(as_vllm)
        vllms.rms_norm.register_impl(provider, supports_args=takes_norm)(rms_norm)
        vllms.fused_add_rms_norm.register_impl(provider, supports_args=takes_fused, inplace=True)(fused_add_rms_norm)
    if platform.device_type != "cpu" and "gpu" not in words:
        _logger.info(
            "fusednorm %s: vLLM keeps its own RMSNorm on %s, because fusednorm's kernels have not been run on a GPU "
            "yet; FUSEDNORM_VLLM=%s,gpu has vLLM prefer fusednorm there too",
            __version__,
            platform.device_type,
            mode,
        )
        return
    _prefer(mode, platform)
    _logger.info("fusednorm %s: vLLM prefers its provider %s (FUSEDNORM_VLLM=%s)", __version__, MODES[mode], setting)


def implementations(as_vllm: bool) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """vLLM's ``rms_norm`` and ``fused_add_rms_norm`` (the second in place), computed by fusednorm.

    Args:
        as_vllm: round at the places of vLLM's native implementation, which normalises the unrounded sum and rounds the
            normalised row to the weight's dtype. Otherwise round as fusednorm does by default.
    """

    def round_norm(x: Tensor, weight: Tensor | None) -> bool:
        return as_vllm and weight is not None and weight.dtype == x.dtype

    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        return ops.rms_norm(x, weight, epsilon, round_norm=round_norm(x, weight))

    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rms_norm_(
            x, x_residual, weight, epsilon, round_sum=not as_vllm, round_norm=round_norm(x, weight)
        )

    return rms_norm, fused_add_rms_norm


def takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether fusednorm can round as vLLM's native ``rms_norm``; if not, vLLM takes the next provider.

    It cannot where vLLM computes float64 rows in float32, where it rounds the normalised row to a weight's dtype that
    is neither x's nor float32, and where it takes the mean of squares of a part of the row.
    """
    return (
        variance_size is None
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (weight is None or (weight.dtype in (x.dtype, torch.float32) and weight.shape == x.shape[-1:]))
    )


def takes_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """As :func:`takes_norm`, for ``fused_add_rms_norm``. It is in place, so both operands must be contiguous."""
    return (
        takes_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def _decline(reason: str) -> None:
    """Logs that vLLM stays as it was, with the reason."""
    import vllm

    found = getattr(vllm, "__version__", "of unknown version")
    _logger.warning(
        "fusednorm %s leaves vLLM %s as it was: %s. It was tested with vLLM 0.32.0; FUSEDNORM_VLLM=off silences this.",
        __version__,
        found,
        reason,
    )


def _unexpected(vllms: Any, priorities: Any, platform: Any) -> str:
    """The first difference between this vLLM and the tested one; empty without a difference."""
    fields = {field.name for field in dataclasses.fields(priorities)} if dataclasses.is_dataclass(priorities) else set()
    if not fields.issuperset(_PARAMETERS):
        return f"expected IrOpPriorityConfig to be a dataclass with the fields {', '.join(_PARAMETERS)}"
    for attribute in ("get_default_ir_op_priority", "device_type"):
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
    """Whether vLLM's native implementation rounds at the places of ``implementations(as_vllm=True)``, in a few rows.

    ``epsilon`` is a power of 4, so large that the mean of squares does not change it. So rstd is exactly a power of 2,
    in any computation, and only the places of rounding can differ. A normalised float16 row is then subnormal, so its
    rounding loses bits.
    """
    x = torch.arange(1024, 2048, device="cpu").half() / 1024
    residual, weight, epsilon = x.flip(0) / 64, x.roll(500), 2.0**30
    rms_norm, fused_add_rms_norm = implementations(as_vllm=True)
    for w in (weight, weight.float(), None):
        theirs = vllms.fused_add_rms_norm.impls["native"].impl_fn(x, residual, w, epsilon)
        ours = fused_add_rms_norm(x.clone(), residual.clone(), w, epsilon)
        if not all(map(torch.equal, theirs, ours)):
            return False
        if not torch.equal(vllms.rms_norm.impls["native"].impl_fn(x, w, epsilon), rms_norm(x, w, epsilon)):
            return False
    return True


def _prefer(mode: str, platform: Any) -> None:
    """Puts a provider into the platform's default order, which vLLM appends to the user's.

    With vLLM's rounding the provider comes just before the native implementation, because implementations that the
    platform prefers may round differently. With the default rounding it comes first.
    """
    platforms_own = platform.get_default_ir_op_priority

    def get_default_ir_op_priority(cls: Any, vllm_config: Any) -> Any:
        priorities = platforms_own(vllm_config)
        for name in _PARAMETERS:
            order = list(getattr(priorities, name))
            order.insert(order.index("native") if mode == "vllm" and "native" in order else 0, MODES[mode])
            setattr(priorities, name, order)
        return priorities

    platform.get_default_ir_op_priority = classmethod(get_default_ir_op_priority)
