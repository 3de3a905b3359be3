"""A part of tox's configuration: its environments that name one folder share what is installed there.

tox makes an environment anew when it finds another environment's name in the folder. These environments have the same
dependencies, so that the name does not matter. They run one after the other: `tox -p` is not for them.
"""

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

    @staticmethod
    def id():
        return "shared"

    @property
    def cache(self):
        return AnyName(self.env_dir)


@impl
def tox_register_tox_env(register):
    """Adds ``runner = shared``."""
    register.add_run_env(Shared)
