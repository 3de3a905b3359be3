"""Calls of the fast path to chosen devices, and calls without it."""

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
