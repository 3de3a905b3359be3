"""Programs in processes of their own, as tests run them.

To import torch takes a second and a half. So a process that has imported it, and nothing of fusednorm, forks for each
program whose variables torch would not have read differently.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from pathlib import Path

#: Variables that torch does not read at its import.
LATER = ("FUSEDNORM_", "PYTEST_", "PYTHONPATH", "TRITON_")
#: The process that forks, once it has been started.
_started = []


def python(*arguments, env=None, cwd=None, timeout=300, fresh=False):
    """What ``python -P ARGUMENTS`` does, as ``subprocess.run`` returns it; a program that hangs is killed.

    Args:
        arguments: ``-c CODE``, ``-m MODULE`` or a file, and the program's own arguments; options of Python before them
            take a fresh process.
        env: all of its variables; default: those of this process.
        cwd: its working directory; default: that of this process.
        timeout: in seconds.
        fresh: start Python, where the program is about what happens until torch is imported.
    """
    arguments, env = [*map(str, arguments)], dict(os.environ if env is None else env)
    of_torch, mine = ({k: v for k, v in of.items() if not k.startswith(LATER)} for of in (env, os.environ))
    option = arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")
    if fresh or option or of_torch != mine or not hasattr(os, "fork"):
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    return _forked(arguments, env, str(cwd or os.getcwd()), timeout)


def printed_by(code, *arguments, timeout=300, fresh=False, **environment):
    """What Python code prints with these variables too; it succeeds, and prints no error."""
    done = python(
        "-c", textwrap.dedent(code), *arguments, env={**os.environ, **environment}, timeout=timeout, fresh=fresh
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _forked(arguments, env, cwd, timeout):
    if not _started or _started[0].poll() is not None:
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        _started[:] = [subprocess.Popen([sys.executable, "-P", __file__], text=True, **pipes)]
        atexit.register(_end, _started[0])
    forks = _started[0]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        job = {"arguments": arguments, "env": env, "cwd": cwd, "files": [*map(str, files)]}
        print(json.dumps(job), file=forks.stdin, flush=True)
        child, begun = int(forks.stdout.readline()), time.monotonic()
        late = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
        late.start()
        status = int(forks.stdout.readline())
        late.cancel()
        seconds = time.monotonic() - begun
        output = [file.read_text(errors="replace") for file in files]
    if status == -signal.SIGKILL and seconds >= timeout:
        raise subprocess.TimeoutExpired(arguments, timeout, *output)
    return subprocess.CompletedProcess(arguments, status, *output)


def _end(forks):
    forks.stdin.close()
    forks.wait()
    forks.stdout.close()


def _serve():
    """Forks for each line of the input, and answers with the child's number and then its status. The child returns."""
    import torch  # noqa: F401

    replies = os.fdopen(os.dup(1), "w")  # the children have another standard output
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        print(child, file=replies, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=replies, flush=True)
    return None


def _run(arguments, env, cwd, files):
    """Runs the program as if Python had been started for it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    if env.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(env)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__" and (job := _serve()):
    status = 0
    try:
        _run(**job)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # Without the half a second in which Python frees what torch's modules have.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
