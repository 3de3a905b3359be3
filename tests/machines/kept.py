"""Files that keep what takes long to make. tox keeps them beside the emulated processors, for two weeks."""

import os
import tempfile
import time
from pathlib import Path

#: The folder of what tests keep from one session of tox to the next; None where it is not tox that runs them.
FOLDER = None
if "TOX_WORK_DIR" in os.environ:
    FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fusednorm-emulation")
TWO_WEEKS = 14 * 24 * 3600


def made_once(file, make):
    """The bytes of a file. If it is not there, they are what ``make()`` returns, and it keeps them."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        made = make()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(made)
    os.replace(new.name, file)  # other processes find the whole file, or none
    return made


def forget_old(folder):
    """Deletes the files of a folder that were made more than two weeks ago."""
    for file in folder.glob("*"):
        if file.stat().st_mtime < time.time() - TWO_WEEKS:
            file.unlink(missing_ok=True)
