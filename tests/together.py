"""Runs several commands at the same time, so that no core waits for the last test of one of them.

    python tests/together.py COMMAND --- COMMAND ...

The first command prints as it runs; the output of the others follows. Fails if one of them fails.
"""

import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack


def main(arguments):
    """Runs the commands, and returns an exit status that is not 0, if there was one."""
    first, *others = [[]]
    for argument in arguments:
        if argument == "---":
            others.append([])
        else:
            (others[-1] if others else first).append(argument)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        started = [subprocess.Popen(first)]
        for command, output in zip(others, outputs, strict=True):
            started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        statuses = [process.wait() for process in started]
        for command, output in zip(others, outputs, strict=True):
            print("+", *command, flush=True)
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
