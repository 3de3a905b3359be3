"""A part of tox's configuration: its environments that name one folder share what is installed there.

Beside them, `aarch64` installs its processors in the background, and `vllm` its packages, because one core does nothing
meanwhile.

tox makes an environment anew when it finds another environment's name in the folder. These environments have the same
dependencies, so that the name does not matter. They run one after the other: `tox -p` is not for them.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, Thread

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
    #: The package, once it is built.
    built = None

    @staticmethod
    def id():
        return "shared"

    @property
    def cache(self):
        return AnyName(self.env_dir)

    def create_python_env(self):
        Shared.installed = False
        super().create_python_env()

    def _install_deps(self):
        """Installs the dependencies, which one core does, and builds the package meanwhile."""
        left_out = self.package_env is None or getattr(self.options, "skip_pkg_install", False)
        if left_out or Shared.installed:
            super()._install_deps()
            return
        with ThreadPoolExecutor(1) as other:
            building = other.submit(super()._build_packages)
            super()._install_deps()
        self.built = building.result()

    def _build_packages(self):
        return self.built or super()._build_packages()

    def _setup_pkg(self):
        if not Shared.installed:
            super()._setup_pkg()
            Shared.installed = True


class Early(VirtualEnvRunner):
    """A virtual environment that is set up while `types`, whose command takes one core, runs."""

    def __init__(self, create_args):
        super().__init__(create_args)
        self._turn, self._error = Lock(), None

    @staticmethod
    def id():
        return "early"

    def setup(self):
        """Sets it up, or waits for that."""
        with self._turn:
            if self._error is not None:
                raise self._error
            super().setup()

    def begin(self):
        """Sets it up. What goes wrong is said when it is wanted."""
        try:
            with self.display_context(suspend=False):
                self.setup()
        except Exception as error:
            self._error = error


#: What tox was asked to do, until the preparation begins; and what may then be set up early.
SESSION, EARLY = [], []


@impl
def tox_add_core_config(core_conf, state):
    """Keeps what tox was asked to do."""
    SESSION.append(state)


@impl
def tox_on_install(tox_env, arguments, section, of_type):
    """Installs the emulated processors of `aarch64` while the first environments run, where both are asked for.

    That environment does the same itself, waits for this, and says what goes wrong. Environments that may be set up
    while `types` runs are noted.
    """
    while SESSION:
        state = SESSION.pop()
        root, names = state.conf.core["tox_root"], set(state.envs.iter())
        if "types" in names:
            EARLY.extend(env for env in map(state.envs.__getitem__, names) if isinstance(env, Early))
        if {"types", "aarch64"} <= names:
            command = [root / "tests" / "machines" / "emulation" / "aarch64", "--install", root]
            nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.Popen(command, cwd=root, start_new_session=True, **nothing)


@impl
def tox_before_run_commands(tox_env):
    """Begins with what can be set up early."""
    if tox_env.name == "types":
        for env in EARLY:
            Thread(target=env.begin).start()


@impl
def tox_register_tox_env(register):
    """Adds ``runner = shared`` and ``runner = early``."""
    register.add_run_env(Shared)
    register.add_run_env(Early)
