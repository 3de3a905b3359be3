"""Which backends the user requested: ``FUSEDNORM_BACKEND``, or for a block of code :class:`fusednorm.use_backend`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import cast

import torch

from fusednorm.calls import fast_path

#: The user's request for the whole process: read once.
ENVIRONMENT = os.environ.get("FUSEDNORM_BACKEND", "").strip()

_request: ContextVar[str] = ContextVar("fusednorm.use_backend", default=ENVIRONMENT)

#: The request in force, and the function that sets another.
request, set_request = _request.get, _request.set
fast_path.follow(request)


def request_of_backward() -> str:
    """The request in force where the backward pass was started.

    For a GPU autograd runs the pass in a thread of its own, where no ``use_backend`` is in force; torch leaves the
    context of the thread that started it there.
    """
    here = copy_context()
    if _request in here:
        return here[_request]
    context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else here
    return cast(str, context.get(_request, ENVIRONMENT))


@contextmanager
def with_request(requested: str) -> Iterator[None]:
    """Has a request of before in force for a block, as a backward pass has that of its forward pass."""
    if requested == request():
        yield
        return
    token = _request.set(requested)
    try:
        yield
    finally:
        _request.reset(token)
