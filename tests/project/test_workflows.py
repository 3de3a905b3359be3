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


def test_the_weekly_environments_are_there():
    """Nothing else runs them between releases."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    listed = re.search(r"environment: \[(.+)\]", (ROOT / ".github" / "workflows" / "newest.yml").read_text())[1]
    for name in listed.split(", "):
        words = " ".join(tox[f"testenv:{name}"][key] for key in ("deps", "commands")).replace("}", " ").split()
        assert not [word for word in words if "==" in word or "constraints" in word]
        assert not [word for word in words if word.startswith("tests/") and not (ROOT / word).is_file()]
