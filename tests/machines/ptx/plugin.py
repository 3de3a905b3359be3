"""A plug-in of pytest, which tests/machines/emulation/ptx names: a GPU backend's kernels run in the machine.

``--variants FILE`` lists which compilations of kernels each test launches, and which of them no other test does.
"""

import importlib
import os
import time
from collections import Counter
from pathlib import Path

import pytest

BACKEND = os.environ["FUSEDNORM_BACKEND"]
stand_in = importlib.import_module(f"ptx.{BACKEND}")
stand_in.install(int(os.environ["FUSEDNORM_EMULATED_SM"]))


def pytest_addoption(parser):
    parser.addoption("--variants", type=Path, metavar="FILE", help="list the variants of each test there, without -n")


def pytest_configure(config):
    if config.getoption("--variants"):
        config.pluginmanager.register(Variants(config.getoption("--variants")), "variants of kernels")


class Variants:
    """Notes which variants each test has loaded. Before each, no call's kernels are held any more."""

    def __init__(self, file):
        self.file, self.of_tests, self.loaded = file, {}, set()

    def pytest_sessionstart(self):
        if BACKEND == "cuda":
            from fusednorm.backends import cuda

            load = cuda._load
            cuda._load = lambda variant, device: self.loaded.add(variant.identity()[:2]) or load(variant, device)
            self.forget = lambda: (cuda._open_launcher.cache_clear(), cuda._open_launcher())
        else:
            from fusednorm.backends.triton import gpu, host

            hold = host.Host._hold

            def noted(held, key, variants, call):
                variants = list(variants)
                self.loaded.update(str(variant.identity()) for variant in variants)
                return hold(held, key, variants, call)

            host.Host._hold, self.forget = noted, gpu._host.held.clear

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.forget()
        self.loaded.clear()
        begin = time.process_time()
        result = yield
        self.of_tests[item.nodeid] = time.process_time() - begin, set(self.loaded)
        return result

    def pytest_sessionfinish(self):
        tests = Counter(variant for _, variants in self.of_tests.values() for variant in variants)
        lines = [f"{len(tests)} variants. Of each test: seconds, its variants, and those of no other test"]
        for name, (seconds, variants) in sorted(self.of_tests.items(), key=lambda of: -of[1][0]):
            alone = sum(tests[variant] == 1 for variant in variants)
            lines.append(f"{seconds:6.2f} {len(variants):4} {alone:4}  {name}")
        self.file.write_text("\n".join(lines) + "\n", encoding="utf-8")
