"""A plug-in of vLLM: its RMSNorm layers, gates and rotations call fusednorm, and more on request. See ``docs/vllm.md``.

vLLM calls :func:`register` in each of its processes (entry-point group ``vllm.general_plugins``).
"""

import os
from functools import partial
from typing import NamedTuple

from fusednorm.vllm import attention, layers, log_probs, products, providers
from fusednorm.vllm.log import say, warn_left
from fusednorm.vllm.roundings import HUGGINGFACE

__all__ = ["MODES", "register"]

#: The values of FUSEDNORM_VLLM, and the provider that vLLM then prefers. ``,gpu`` may follow all but the last.
MODES = {**providers.BY_CONTRACT, "off": None}

#: May follow ``huggingface``: vLLM keeps its own products of matrices, or its own attention.
OWN_PRODUCTS, OWN_ATTENTION = "own-products", "own-attention"


class Request(NamedTuple):
    """The mode that FUSEDNORM_VLLM requests, whether for GPUs too, and what else is fusednorm's on CPUs."""

    mode: str
    on_gpus: bool
    products: bool
    attention: bool


def requested() -> Request | None:
    """The request of FUSEDNORM_VLLM; None for a value that it may not have."""
    words = {word.strip() for word in (os.environ.get("FUSEDNORM_VLLM", "").strip() or "vllm").split(",")}
    own = words & {OWN_PRODUCTS, OWN_ATTENTION}
    modes = words - {"gpu"} - own or {"vllm"}
    if len(modes) > 1 or not modes <= MODES.keys():
        return None
    mode = modes.pop()
    exact = mode == HUGGINGFACE
    if own and not exact:
        return None
    return Request(mode, "gpu" in words, exact and OWN_PRODUCTS not in own, exact and OWN_ATTENTION not in own)


def register() -> None:
    """Adds providers to vLLM's operations ``rms_norm`` and ``fused_add_rms_norm``, and makes vLLM prefer one.

    ``fusednorm`` rounds at the places of vLLM's native implementation, ``fusednorm_default`` as fusednorm does by
    default, ``fusednorm_huggingface`` as Llama of transformers. The environment variable FUSEDNORM_VLLM chooses a
    contract: ``vllm`` (also if it is not set), ``default``, ``huggingface``, or ``off`` for none. The user's option
    ``--ir-op-priority`` overrides it.

    On CPUs it also registers classes in place of vLLM's layers for gates, gated norms, rotations and Gemma's norm
    (``layers.py``). vLLM's compiler looks for these layers on GPUs, so there they stay. With ``huggingface`` vLLM's
    unquantized linear layers and its head call ``fusednorm.linear`` (``products.py``), its decoders' attention
    ``fusednorm.paged_attention`` (``attention.py``), and its sampler ``fusednorm.log_softmax`` (``log_probs.py``), also
    on CPUs only. ``huggingface,own-products`` leaves products to vLLM, and ``huggingface,own-attention`` attention.

    On platforms other than CPUs vLLM prefers neither, unless the variable also says ``gpu``, as in ``vllm,gpu``: the
    kernels for GPUs have not been run on one. This function decides that, through vLLM's order of preference, and not
    ``takes_norm``, because vLLM caches compiled code by that order.

    vLLM does not catch the errors of a plug-in, so this function raises none: if the variable has another value, or
    this version of vLLM is not supported, it logs a warning and leaves vLLM as it was.
    """
    setting = os.environ.get("FUSEDNORM_VLLM", "").strip() or "vllm"
    found = requested()
    if found is None:
        _decline(
            f"FUSEDNORM_VLLM is {setting!r}, it must be one of {', '.join(MODES)}; "
            "with ',gpu' after the first three it holds for GPUs too, and vLLM keeps its own products of matrices "
            f"with 'huggingface,{OWN_PRODUCTS}', and its own attention with 'huggingface,{OWN_ATTENTION}'"
        )
        return
    mode = found.mode
    provider = MODES[mode]
    if provider is None:
        say("FUSEDNORM_VLLM=off, vLLM keeps its own RMSNorm")
        return
    try:
        from vllm.config.kernel import IrOpPriorityConfig
        from vllm.ir import ops as vllms
        from vllm.platforms import current_platform
    except ImportError as error:
        _decline(f"expected vllm.ir.ops and vllm.config.kernel.IrOpPriorityConfig ({error})")
        return
    platform = type(current_platform)
    unexpected = providers.unexpected(vllms, IrOpPriorityConfig, platform)
    if unexpected:
        _decline(unexpected)
        return
    if providers.AS_VLLM in vllms.rms_norm.impls:
        return
    providers.add(vllms)
    on_cpu = platform.device_type == "cpu"
    if not on_cpu and not found.on_gpus:
        say(
            f"vLLM keeps its own RMSNorm on {platform.device_type}, because fusednorm's kernels have not been run on a "
            f"GPU yet; FUSEDNORM_VLLM={mode},gpu has vLLM prefer fusednorm there too"
        )
        return
    with_products = found.products and on_cpu
    providers.prefer(mode, platform, f"{mode}, {'' if with_products else 'own '}products")
    say(f"vLLM prefers its provider {provider} (FUSEDNORM_VLLM={setting})")
    if on_cpu:
        layers.replace_in_workers(platform, partial(_replace, found))
    for kept, what in ((not with_products, "products of matrices"), (not (found.attention and on_cpu), "attention")):
        if mode == HUGGINGFACE and kept:
            say(f"vLLM keeps its own {what}")


def _replace(found: Request) -> None:
    """Has more of vLLM replaced on CPUs, in a process that makes a model."""
    layers.replace(found.mode, found.products)
    if found.products:
        products.replace()
    if found.attention:
        attention.replace()
    if found.mode == HUGGINGFACE:
        log_probs.replace()


def _decline(reason: str) -> None:
    """Logs that vLLM stays as it was, with the reason."""
    import vllm

    found = getattr(vllm, "__version__", "of unknown version")
    warn_left(f"vLLM {found} as it was: {reason}. It was tested with vLLM 0.32.0; FUSEDNORM_VLLM=off silences this.")
