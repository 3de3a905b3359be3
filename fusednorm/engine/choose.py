"""Which backend takes a call.

Three questions, kept apart: can this machine use a backend (``unavailable``), can the backend take these arguments
(``unsuitable``), and what did the user request (``FUSEDNORM_BACKEND``, :class:`use_backend`). A request never falls
back; without one, the first backend in :data:`fusednorm.backends.NAMES` that can takes the call.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import torch

import fusednorm.backends
from fusednorm.backends import MODULES, NAMES
from fusednorm.calls import fast_path, self_check
from fusednorm.calls.call import AnyCall, Call, KindOfCall, Operation, Quantize, RMSNorm, Step
from fusednorm.calls.process import BackendError, BackendInfo
from fusednorm.declare import written
from fusednorm.declare.plan import OF_CALLS
from fusednorm.engine.backend import Backend
from fusednorm.engine.checked_backend import FirstCalls, raised_by
from fusednorm.engine.requested import ENVIRONMENT, request, set_request
from fusednorm.engine.self_check import SelfChecked
from fusednorm.engine.substitutes import Composition, Meanwhile

#: Third-party packages name their backends in this entry-point group.
ENTRY_POINTS = "fusednorm.backends"

_REQUIRED = ("DEVICES", "unavailable", "unsuitable", "plan", "forward", "backward")

_registered: dict[str, Backend] = {}
#: The requests to which the blocks that a thread or task is in will return, the outermost first.
_before: ContextVar[tuple[str, ...]] = ContextVar("fusednorm.use_backend.before", default=())
#: One of them serves the calls of an operation.
Chosen = Backend | FirstCalls | Composition | Meanwhile | SelfChecked

#: The operations of which a backend returned other bits than the reference, by the backend's name and theirs.
_wrong: set[tuple[str, str]] = set()

#: By the request and the operation; with a step too, which the backend takes in the same call, or else None.
_selected: dict[tuple[str, Operation] | tuple[str, Operation, Step], Chosen | None] = {}


def register_backend(name: str, backend: Backend) -> None:
    """Adds a backend for this process.

    It can then be asked for by name, and takes calls without being asked where no backend of fusednorm but the
    reference can. A package that should add its backend to every process names it in the entry-point group
    ``fusednorm.backends`` instead.

    Args:
        name: what ``FUSEDNORM_BACKEND`` and :class:`use_backend` will call it; letters, digits and underscores.
        backend: an object with the attributes of :class:`fusednorm.registry.Backend`, such as a module.

    Raises:
        ValueError: the name is malformed or taken.
        TypeError: an attribute is missing.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must consist of letters, digits and underscores, got {name!r}")
    if name in known():
        raise ValueError(f"name {name!r} is taken; the names in use are {', '.join(known())}")
    _register(name, backend)


def _register(name: str, backend: Backend) -> None:
    missing = [attribute for attribute in _REQUIRED if not hasattr(backend, attribute)]
    if missing:
        raise TypeError(f"backend {name!r} lacks {', '.join(missing)}; fusednorm.registry.Backend says what each does")
    devices = backend.DEVICES
    if not isinstance(devices, tuple) or not all(isinstance(device, str) for device in devices):
        raise TypeError(f"backend {name!r} has DEVICES {devices!r}; it must be a tuple of names such as ('cpu',)")
    for attribute in _REQUIRED[1:]:
        if not callable(function := getattr(backend, attribute)):
            raise TypeError(f"backend {name!r}: {attribute} must be a function, got {type(function).__name__}")
    _registered[name] = backend
    _selected.clear()
    fast_path.devices_of.clear()


def _plug_ins() -> dict[str, EntryPoint]:
    """The entry points of installed packages; a name of ours cannot be taken over."""
    found = {e.name: e for e in entry_points(group=ENTRY_POINTS)}
    return {name: e for name, e in found.items() if name not in (*NAMES, *_registered)}


def known() -> list[str]:
    """Every name that may be asked for."""
    return [*NAMES[:-1], *_registered, *_plug_ins(), *NAMES[-1:]]


def load(name: str) -> Backend:
    """The backend of that name, imported now if it was not before."""
    if name in NAMES:
        return cast(Backend, importlib.import_module(f"fusednorm.backends.{MODULES.get(name, name)}"))
    plug_in = None if name in _registered else _plug_ins().get(name)
    if plug_in is not None:  # else another thread has registered it meanwhile
        try:
            _register(name, plug_in.load())
        except (Exception, SystemExit) as error:  # another package, whose import may raise anything
            raise BackendError(
                f"its entry point fails ({type(error).__name__}: {error}); repair or uninstall the package that has it"
            ) from error
    return _registered[name]


def _reasons(name: str, function: str, *arguments: Operation) -> list[str]:
    """The answer of ``unavailable`` or ``unsuitable``, if that is a list of reasons."""
    ask = getattr(load(name), function)
    with raised_by(name, function):
        found: object = ask(*arguments)
    if not isinstance(found, list) or not all(isinstance(reason, str) for reason in found):
        raise TypeError(f"backend {name!r} gives its reasons as {found!r}; they must be a list of str, or an empty one")
    return found


def known_as(name: str) -> str | None:
    """The name of a backend, in whatever case it was written; None if there is none of that name."""
    for find in (lambda: (*NAMES, *_registered), _plug_ins):  # the second reads every installed package's metadata
        same = [known for known in find() if known.lower() == name.lower()]
        if same:
            return name if name in same else same[0]
    return None


def parse(given: str, source: str) -> list[str]:
    """The names of backends in a request, the preferred one first.

    Args:
        given: one name, or several with commas between, in any case.
        source: where the request comes from, for the error.

    Raises:
        BackendError: a name is unknown, or there is none.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    found = {name: known_as(name) for name in names}
    unknown = [name for name, its in found.items() if its is None]
    if unknown or not names:
        raise BackendError(
            f"{source} names the backend {', '.join(map(repr, unknown)) or repr(given)}, which does not exist; "
            f"the names are {', '.join(known())}, or several with commas between, the preferred first"
        )
    return [its for its in found.values() if its is not None]


def _candidates(requested: str) -> Iterator[str]:
    """The backends to try, the preferred ones first. Plug-ins are looked up only once none of ours was chosen."""
    if requested:
        yield from parse(requested, "FUSEDNORM_BACKEND")  # what use_backend was given has been parsed
        return
    yield from (name for name in NAMES if name != "reference")
    yield from tuple(_registered)  # another thread may add to it between two names
    yield from _plug_ins()
    yield "reference"


def _devices(name: str) -> tuple[str, ...]:
    """The types of devices that a backend runs on; none if it cannot be loaded."""
    return load(name).DEVICES if name in (*NAMES, *_registered) else ()


def _unusable(name: str, device: torch.device) -> list[str]:
    """Why a backend cannot run on such a device of this machine; empty if it can."""
    try:
        backend = load(name)
    except BackendError as error:
        return list(map(str, error.args))
    if device.type not in backend.DEVICES and "any" not in backend.DEVICES:
        return [f"it runs on {' and '.join(backend.DEVICES)} tensors, and these are on {device.type}"]
    return _reasons(name, "unavailable")


def _unknown(name: str, operation: Operation) -> list[str]:
    """A sentence if a part of an operation is younger than the backend and unknown to it; empty if it knows all."""
    known: frozenset[str] = getattr(load(name), "KNOWS", frozenset())
    for feature in operation.features:
        if feature not in known:
            return [f"its kernels have no {feature}"]
    return []


def _found_wrong(name: str, operation: Operation) -> list[str]:
    """A sentence if a backend's self-check found other bits than the reference's; empty if it did not."""
    step = "norm" if operation.step is None else operation.step.name
    return ["its self-check found other bits than the reference's"] if (name, step) in _wrong else []


def _refuse(name: str, call: AnyCall) -> None:
    """Has calls like one whose bits were wrong go to other backends from now on, in all threads."""
    backward = isinstance(call, Call) and call.backward
    of_call = call.name if isinstance(call, Call) else "quantize" if isinstance(call, Quantize) else "norm"
    if isinstance(call, Call) and (plan := OF_CALLS.get(call.name)) is not None and plan.kernel is not None:
        of_call = plan.kernel.feature
    _wrong.add((name, f"{of_call}_backward" if backward else of_call))
    _selected.clear()
    fast_path.close(getattr(load(name), "fast_path", None))


def _refusal(name: str, operation: Operation) -> list[str]:
    """Why a backend cannot take a call; empty if it can."""
    refused = _unusable(name, operation.device) or _unknown(name, operation) or _found_wrong(name, operation)
    return refused or _reasons(name, "unsuitable", operation)


def _takes(name: str, operation: Operation) -> bool:
    """Whether a backend can take a call."""
    return not _refusal(name, operation)


def _plan(name: str, operation: Operation) -> str:
    with raised_by(name, "plan"):
        return load(name).plan(operation)


def choose(operation: Operation) -> Explanation:
    """The backend for a call, and why.

    Raises:
        BackendError: the user requested backends of which none can take the call, or an unknown one.
    """
    requested, passed_over = request(), dict[str, list[str]]()
    find = _of_kind if isinstance(operation, KindOfCall) else _of_norm
    found = find(cast(Any, operation), requested, passed_over)
    if found is not None:
        return found
    lines = [f"  {name}: {reason}" for name, reasons in passed_over.items() for reason in reasons]
    source = "FUSEDNORM_BACKEND" if requested == ENVIRONMENT else "use_backend"
    raise BackendError(
        f"no backend that {source} allows ({requested}) can take this call ({operation}):\n"
        + "\n".join(lines)
        + f"\n{source} never falls back to others: add one to it (such as '{requested},reference'), or unset it to "
        "let fusednorm choose; `python -m fusednorm` shows what this machine has"
    )


def _of_norm(operation: RMSNorm, requested: str, passed_over: dict[str, list[str]]) -> Explanation | None:
    """The first backend that takes a norm, in one call or in several; None: all are passed over."""
    for name in _candidates(requested):
        reasons = _refusal(name, operation)
        if not reasons:
            return Explanation(name, _plan(name, operation), operation, requested, passed_over)
        parts = Composition.parts(operation, partial(_takes, name))
        of_parts = [reason for part in parts for reason in _refusal(name, part)]
        if parts and not of_parts:
            plan = f"{Composition.in_words(operation, parts)}: {_plan(name, parts[0])}"
            return Explanation(name, plan, operation, requested, passed_over, parts)
        passed_over[name] = list(dict.fromkeys((*reasons, *of_parts)))
    return None


def _of_kind(kind: KindOfCall, requested: str, passed_over: dict[str, list[str]]) -> Explanation | None:
    """The first backend that takes a declared operation; None: none runs on this device.

    The formula serves where the first one that runs on it does not know the operation, or all find it unsuitable.
    """
    by_formula: Explanation | None = None
    for name in _candidates(requested):
        reasons = _unusable(name, kind.device) or _found_wrong(name, kind)
        if not reasons:
            unknown = bool(_unknown(name, kind))
            reasons = [] if unknown else _reasons(name, "unsuitable", kind)
            found = partial(Explanation, name, _plan(name, kind), kind, requested, dict(passed_over))
            if not reasons:
                return found(by_formula=unknown)
            by_formula = by_formula or found(by_formula=True)
        passed_over[name] = reasons
    return by_formula


def selected(operation: Operation) -> Chosen | None:
    """The backend that :func:`select` has chosen for such calls before: one look-up.

    Raises:
        KeyError: it has chosen none before.
    """
    return _selected[request(), operation]


def select(operation: Operation) -> tuple[Chosen | None, Explanation]:
    """Chooses the backend for a call, once for all calls of the operation; None: the formula serves it.

    Raises:
        BackendError: the user requested backends of which none can take the call, or an unknown one.
    """
    explanation = choose(operation)
    name = explanation.backend
    chosen: Chosen | None
    if explanation.by_formula:
        chosen = None
    elif name not in NAMES:
        chosen = _composed(FirstCalls(name, load(name)), explanation.parts)
    elif (other := getattr(load(name), "MEANWHILE", None)) is not None:
        both = Meanwhile(_proving_itself(name), _proving_itself(other), partial(_takes, other))
        chosen = _composed(both, explanation.parts)
    else:
        chosen = _proving_itself(name, explanation.parts)
    _selected[explanation.request, operation] = chosen
    return chosen, explanation


def _composed(backend: Any, parts: tuple[RMSNorm, ...]) -> Any:
    """A backend, which serves an operation by its parts if there are some."""
    return Composition(backend, parts) if parts else backend


def _proving_itself(name: str, parts: tuple[RMSNorm, ...] = ()) -> Any:
    """A backend, which is compared with the reference first where no test of ours has run.

    So are torch's operations on its device, between the parts.
    """
    backend = _composed(load(name), parts)
    return SelfChecked(name, backend, _refuse) if self_check.wanted(name) else backend


def serving(operation: RMSNorm, step: Step, select_rows: Callable[[RMSNorm], Chosen]) -> Chosen | None:
    """The backend of such rows, if it takes the norm and the step in one call; None: several calls must serve them.

    ``select_rows`` selects the backend of the rows; it is asked at the first call.
    """
    key = request(), operation, step
    try:
        return _selected[key]
    except KeyError:
        backend, explanation = select_rows(operation), choose(operation)
        return _selected.setdefault(key, backend if explanation.takes(step) else None)


class use_backend:  # noqa: N801 - reads as a statement: `with use_backend("cpu"):`
    """Requests a backend, or several, for a block of code: ``with use_backend("cpu"):``.

    Holds in this thread or asynchronous task only (also in threads that it starts, where Python passes on its context,
    as free-threaded Python does from 3.14 on), and beats ``FUSEDNORM_BACKEND``. Like that variable it never falls back:
    a call that none of the named backends can take raises :class:`BackendError`.

    Args:
        names: a backend's name, or several with commas between or as a list, the preferred first. Case is ignored.
        more: further names.

    Raises:
        BackendError: a name is unknown.
    """

    def __init__(self, names: str | Sequence[str], *more: str) -> None:
        given = [*(names if isinstance(names, list | tuple) else (names,)), *more]
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"names must be str such as 'cpu' or 'triton,reference', got {name!r}")
        self._names = ",".join(parse(",".join(given), "use_backend"))

    def __repr__(self) -> str:
        call = f"fusednorm.use_backend({self._names!r})"
        return f"<{call}, which takes effect in a block: `with {call}:`>"

    # An instance holds nothing of a block: it may be entered again within itself, and by several threads at once.
    def __enter__(self) -> None:
        _before.set((*_before.get(), request()))
        set_request(self._names)

    def __exit__(self, *_: object) -> None:
        *outer, before = _before.get()
        set_request(before)
        _before.set(tuple(outer))


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes and why; printing it gives a paragraph."""

    #: The backend's name.
    backend: str
    #: How it will run the call.
    plan: str
    #: The operation that the call asks for.
    operation: Operation
    #: The backends that the user requested; empty if none.
    request: str
    #: The backends that would have been preferred, each with its reasons.
    passed_over: dict[str, list[str]] = field(default_factory=dict)
    #: The operations that the backend takes and serves this one by; none if it takes this one.
    parts: tuple[RMSNorm, ...] = ()
    #: Where gradients are recorded, the steps that torch's operations compute, in words.
    by_torch: tuple[str, ...] = ()
    #: Whether the backend does not know the declared operation, so that torch's operations compute the formula.
    by_formula: bool = False

    @property
    def composed(self) -> bool:
        """Whether the backend serves the operation by others that it takes."""
        return bool(self.parts)

    @property
    def module(self) -> Backend:
        """The backend itself."""
        return load(self.backend)

    def takes(self, step: Step) -> bool:
        """Whether the backend takes the operation and a step in one call."""
        return not self.composed and not _refusal(self.backend, self.operation._replace(step=step))

    def depends_on_operation(self) -> bool:
        """Whether another call on this device might go to another backend, or to this one without a composition."""
        device = self.operation.device.type
        others = any(
            {device, "any"} & set(_devices(name)) and not load(name).unavailable() for name in self.passed_over
        )
        return self.composed or others

    def warn(self) -> None:
        """Warns where the choice fell to the reference although a backend for this device exists."""
        device = self.operation.device.type
        if self.request or self.backend != "reference":
            return
        meant = [name for name in self.passed_over if device in _devices(name)]
        if meant and not _found_wrong(meant[0], self.operation):  # of which the user was told
            warnings.warn(
                f"fusednorm runs on {device} through its reference, which is slow, because the backend {meant[0]!r} "
                f"cannot be used: {'; '.join(self.passed_over[meant[0]])}",
                RuntimeWarning,
                stacklevel=_level_of_caller(),
            )

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.plan}", f"  for {self.operation}"]
        if self.backend in NAMES and self_check.wanted(self.backend):
            lines.append("  no test of ours has run here: the first call of each kind is compared with the reference")
        lines += [f"  with gradients, torch's operations {step}" for step in self.by_torch]
        lines += [f"  not {name}: {reason}" for name, reasons in self.passed_over.items() for reason in reasons]
        lines += [f"  requested: {self.request}"] if self.request else []
        return "\n".join(lines)


def _level_of_caller() -> int:
    """The stack level, for a function that calls this, of the line outside of fusednorm that called it."""
    level, frame = 0, inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module != "fusednorm" and frame.f_code.co_filename != written.FILE:
            break
        level, frame = level + 1, frame.f_back
    return level


def backends() -> list[BackendInfo]:
    """Every backend, with the reasons why this machine cannot use it."""
    infos = []
    for name in known():
        try:
            reasons = _reasons(name, "unavailable")
        except Exception as error:  # another package's code: its fault is a line in the list
            if name in NAMES:
                raise
            reasons = [str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"]
        infos.append(BackendInfo(name, not reasons, reasons, _devices(name)))
    return infos


vars(fusednorm.backends).update(listed=backends)  # a package that can be called
