"""The findings about this machine, ``python -m fusednorm doctor``."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fusednorm
from fusednorm import environment, vllm
from fusednorm.backends import NAMES
from fusednorm.calls import fast_path, self_check
from fusednorm.calls.devices import devices


def _processor() -> str:
    """The processor's name as the operating system reports it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _choice(device: torch.device) -> dict[str, Any]:
    """The backend that takes a bfloat16 call on the device, or the error."""
    operand = torch.empty(1, 4096, dtype=torch.bfloat16, device=device)
    try:
        explanation = fusednorm.explain(operand, operand, operand[0])
    except fusednorm.BackendError as error:
        return {"device": str(device), "error": str(error)}
    names = ("backend", "plan", "passed_over")
    return {"device": str(device)} | {name: getattr(explanation, name) for name in names}


def report() -> dict[str, Any]:
    """The findings, as plain data; ``python -m fusednorm doctor --json`` prints them.

    A wrong value of a variable is a finding too: in "remarks", or among the reasons of its backend.
    """
    from fusednorm.backends import cpu
    from fusednorm.backends.cuda import compiler as cuda_compiler  # here, because other commands do not need both

    findings: dict[str, Any] = {
        "fusednorm": fusednorm.__version__,
        "spec": fusednorm.SPEC_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cffi": _version("cffi"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "environment": {n: os.environ[n] for n in sorted(os.environ) if n.startswith(environment.PREFIX)},
        "remarks": {name: f"nothing reads this variable; {cure}" for name, cure in environment.unread().items()},
        "fast_path_closed": fast_path.why_closed() or None,
        "backends": [vars(info) for info in fusednorm.backends()],
        "self_check": [name for name in NAMES if self_check.wanted(name)],
        "devices": [_choice(device) for device in devices()],
        "cache": cuda_compiler.cache(),
    }
    if vllm.requested() is None:
        findings["remarks"]["FUSEDNORM_VLLM"] = f"it must be one of {', '.join(vllm.MODES)}; vLLM is left as it was"
    if self_check.SETTING not in ("", self_check.FIRST, self_check.OFF):
        findings["remarks"]["FUSEDNORM_SELF_CHECK"] = "it must be first or off; the platform decides, as without it"
    if not cpu.unavailable():
        findings["instruction_sets"] = list(cpu.variants())
        findings["instruction_set"] = cpu.variant()
        findings["openmp"] = cpu.openmp() or None
    return findings


def platform_facts() -> dict[str, Any]:
    """The facts that go with results: nothing of the user, no name of the machine, no path."""
    found = report()
    names = (
        "fusednorm",
        "spec",
        "python",
        "torch",
        "triton",
        "processor",
        "threads",
        "instruction_sets",
        "instruction_set",
    )
    gpus = [torch.get_device_module(d).get_device_name(d) for d in devices() if d.type in ("cuda", "xpu")]
    system = f"{platform.system()} {platform.machine()}"
    return {**{name: found.get(name) for name in names}, "system": system, "gpus": gpus}


def facts(device: torch.device, *more: str) -> dict[str, Any]:
    """The findings that figures of a device are kept with, and others by name; "device" is a GPU's name, or "cpu"."""
    found = report()
    device_name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    names = ("fusednorm", "spec", "python", "torch", "system", "processor", *more)
    return {**{name: found.get(name) for name in names}, "device": device_name}


def status(found: dict[str, Any]) -> int:
    """The doctor's exit status: 1 if calls on a device raise, or if a variable has a value that cannot be used."""
    raises = any("error" in choice for choice in found["devices"])
    reasons = [reason for info in found["backends"] for reason in info["reasons"]]
    unusable = {"FUSEDNORM_VLLM", "FUSEDNORM_SELF_CHECK"} & set(found["remarks"])
    return int(raises or bool(unusable) or any(r.startswith(environment.PREFIX) for r in reasons))


def show(console: Console) -> int:
    """Prints the findings for a person. Returns the exit status."""
    found = report()
    console.print(f"[bold]fusednorm {found['fusednorm']}[/], specification {found['spec']}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name in ("python", "torch", "triton", "cffi", "system", "processor", "threads"):
        facts.add_row(name, "not installed" if found[name] is None else escape(str(found[name])))
    if "instruction_set" in found:
        sets = [f"{name} (in use)" if name == found["instruction_set"] else name for name in found["instruction_sets"]]
        facts.add_row("instruction sets", ", ".join(sets))
        facts.add_row("OpenMP", found["openmp"] or "none found: calls run on one thread")
    closed = found["fast_path_closed"]
    facts.add_row("fast path", "open" if closed is None else f"closed, calls are slower: {escape(closed)}")
    if "cache" in found:
        kernels = "{problem}" if found["cache"]["problem"] else "{kernels} compiled ones in {folder}"
        facts.add_row("CUDA kernels", escape(kernels.format(**found["cache"])))
    for name, value in found["environment"].items():
        remark = found["remarks"].get(name)
        facts.add_row(escape(name), escape(value) + (f" [yellow]({escape(remark)})[/]" if remark else ""))
    console.print(facts)

    table = Table("backend", "devices", "state", title="Backends", title_justify="left")
    unneeded = "triton_cpu"  # which takes a build from source, and does nothing that cpu does not
    if "triton_cpu" in found["environment"].get("FUSEDNORM_BACKEND", "") or "instruction_set" not in found:
        unneeded = ""
    for info in found["backends"]:
        state = "[green]available[/]"
        if info["name"] in found["self_check"]:
            state += ": the first call of each kind is compared with the reference"
        if not info["available"]:
            state = "[yellow]not available[/]: " + escape("; ".join(info["reasons"]))
            if info["name"] == unneeded and not any(r.startswith(environment.PREFIX) for r in info["reasons"]):
                state = "not available, and not needed: cpu takes the same calls"
        table.add_row(info["name"], ", ".join(info["devices"]), state)
    console.print(table)
    for choice in found["devices"]:
        where = f"{'CPU' if choice['device'] == 'cpu' else choice['device']} tensors"
        if "error" in choice:
            console.print(f"[red]{where}: {escape(choice['error'])}[/]")
        else:
            plan = f"[bold]{choice['backend']}[/]: {escape(choice['plan'])}"
            console.print(f"{where} go to backend {plan}.")
    console.print("Next: `python -m fusednorm check` compares every backend with the reference.")
    return status(found)
