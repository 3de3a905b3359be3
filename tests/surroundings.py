"""What surrounds calls in tests: torch's number of threads, and an interrupt by the user."""

import contextlib
import signal

import pytest
import torch

#: A test that takes :func:`interrupted`.
takes_interrupts = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="this system has no timer that sends signals"
)


@contextlib.contextmanager
def threads(count):
    """Runs a block with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def interrupted(after):
    """Interrupts a block after so many seconds, and demands that it raises KeyboardInterrupt."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
