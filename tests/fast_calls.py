"""Calls of the fast path to chosen devices, and calls without it."""

import sys

from fusednorm.calls import fast_path


def fast_calls(*devices):
    """A function that makes a call of a kind, its arguments by the names of C; it returns None if that is refused."""

    def take(kind, **arguments):
        request = f"tests {devices}"
        fast_path.devices_of[request] = sum(fast_path.DEVICES[device] for device in devices)
        return fast_path.Entry(kind, " ".join(arguments)).open(request)(*arguments.values())

    return take


def close_fast_path(monkeypatch):
    """Has Python make all calls of operations that have been called, until the patch is undone."""
    for request in list(fast_path.devices_of):
        monkeypatch.delitem(fast_path.devices_of, request)


def note_fast_calls(monkeypatch, taken=True):
    """Notes, in a list, whether calls of public functions were made by the fast path; else it makes none."""
    found = []

    def noted(entry):
        def run(*arguments):
            result = entry(*arguments) if taken else None
            found.append(result is not None)
            return result

        return run

    for room in [module for name, module in sys.modules.items() if name.startswith("fusednorm.operations.")]:
        for name, entry in list(vars(room).items()):
            if type(entry) is type(len) and entry.__name__ == "entry":
                monkeypatch.setattr(room, name, noted(entry))
    return found
