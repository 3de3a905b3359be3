"""Commands, in this process and in one of their own."""

import os
import sys

import pytest
from processes import python

from fusednorm.__main__ import main


@pytest.fixture
def called(monkeypatch):
    """The exit status of a command in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fusednorm", *map(str, arguments)])
        try:
            return main()
        except SystemExit as ended:
            return ended.code

    return call


@pytest.fixture(scope="session")
def run():
    """A command in a process of its own, without variables of fusednorm but those given."""

    def call(*arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_")}
        return python("-m", "fusednorm", *arguments, env=clean | environment)

    return call
