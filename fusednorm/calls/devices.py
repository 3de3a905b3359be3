"""The devices of this machine."""

from __future__ import annotations

import torch


def devices() -> list[torch.device]:
    """The devices that torch can use, the CPU first."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    return found


def present(device: torch.device | str) -> torch.device:
    """Returns the device with this name.

    Raises:
        ValueError: torch does not know it, or cannot use it here.
    """
    found = devices()
    # A name without a number means the current device of its type.
    names = {str(d) for d in found} | {d.type for d in found} | {"cpu:0"}
    if str(device) not in names:
        raise ValueError(f"device {device} is not here: torch {torch.__version__} finds {', '.join(map(str, found))}")
    return torch.device(device)
