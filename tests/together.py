"""Runs several commands at the same time, where each leaves a core with nothing to do.

    python tests/together.py COMMAND --- COMMAND ...

The output of each command is printed when it and all before it have ended. Fails if one of them fails.
"""

import shutil
import subprocess
import sys
import tempfile


def main(arguments):
    commands = [[]]
    for argument in arguments:
        if argument == "---":
            commands.append([])
        else:
            commands[-1].append(argument)
    running = []
    for command in commands:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        running.append((command, output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)))
    status = 0
    for command, output, process in running:
        status = process.wait() or status
        print("+", *command, flush=True)
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
        output.close()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
