"""A part of tox's configuration: its environments that name one folder share what is installed there.

Beside them, the environments `aarch64` and `vllm` are prepared in the background, because one core does nothing
meanwhile.

tox makes an environment anew when it finds another environment's name in the folder. These environments have the same
dependencies, so that the name does not matter. They run one after the other: `tox -p` is not for them.
"""

import subprocess
import sys
import threading
from contextlib import contextmanager

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner


class AnyName(Info):
    """What tox notes about an environment, without the environment's name."""

    @contextmanager
    def compare(self, value, section, sub_section=None):
        if section == "ToxEnv":
            value = {"type": value["type"]}
        with super().compare(value, section, sub_section) as result:
            yield result


class Shared(VirtualEnvRunner):
    """A virtual environment that several environments of tox use."""

    #: Whether this session has installed the package there: for one environment it does so for all.
    installed = False

    @staticmethod
    def id():
        return "shared"

    @property
    def cache(self):
        return AnyName(self.env_dir)

    def create_python_env(self):
        Shared.installed = False
        super().create_python_env()

    def _setup_pkg(self):
        if not Shared.installed:
            super()._setup_pkg()
            Shared.installed = True


class Prepared(VirtualEnvRunner):
    """A virtual environment whose dependencies may be installed in the background already."""

    @staticmethod
    def id():
        return "prepared"

    def setup(self):
        if PREPARATION:
            PREPARATION[0].join()
        super().setup()


#: What tox was asked to do, until the preparation begins.
SESSION = []

#: The thread that prepares environments.
PREPARATION = []

#: Options with which tox installs the dependencies of an environment, and does nothing else.
INSTALL = ["--notest", "--skip-pkg-install"]


@impl
def tox_add_core_config(core_conf, state):
    """Keeps what tox was asked to do."""
    SESSION.append(state)


@impl
def tox_on_install(tox_env, arguments, section, of_type):
    """Prepares `aarch64` and then `vllm` while the first environments are installed and run, where both are asked for.

    Both do the same themselves if it is not done then, and say what goes wrong. (`aarch64` waits for its command.)
    """
    while SESSION:
        state = SESSION.pop()
        root = state.conf.core["tox_root"]
        commands = {
            "aarch64": [root / "tests" / "emulation" / "aarch64", "--install", root],
            "vllm": [sys.executable, "-m", "tox", "--workdir", state.conf.core["work_dir"], *INSTALL, "-e", "vllm"],
        }
        names = set(state.envs.iter())
        if "types" in names:
            chosen = [command for name, command in commands.items() if name in names]
            PREPARATION.append(threading.Thread(target=prepare, args=[root, chosen], daemon=True))
            PREPARATION[0].start()


def prepare(root, commands):
    """Runs commands one after the other, in the background."""
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    for command in commands:
        subprocess.run(command, cwd=root, start_new_session=True, check=False, **nothing)


@impl
def tox_register_tox_env(register):
    """Adds ``runner = shared`` and ``runner = prepared``."""
    register.add_run_env(Shared)
    register.add_run_env(Prepared)
