"""What GitHub runs is what `tox` runs."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_environment_has_its_place():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    wanted = re.split(r",\s*", tox["tox"]["env_list"])
    listed = re.findall(r"^          - ([\w,]+)$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(), flags=re.M)
    assert sorted(",".join(listed).split(",")) == sorted(wanted)
