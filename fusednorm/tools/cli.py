"""The command line of ``fusednorm``, without what takes long to import: torch takes seconds.

So a question about the commands and a typing error are answered at once: ``fusednorm/__init__.py`` calls
:func:`parsed` before it imports torch. ``commands.py`` runs the commands, and reads the names of devices and backends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fusednorm.version import SPEC_VERSION, __version__

#: The names of all that ``compare`` and ``bench`` measure, in ``workloads.py`` and ``peers.py``; a test compares them.
DTYPES = ("bfloat16", "float16", "float32")
OPERATIONS = (
    *("add_norm", "norm", "layer_norm", "add_layer_norm", "norm_add", "norm_add_norm"),
    *("add_norm_int8", "add_norm_fp8", "add_norm_fp8_block"),
    *("gate", "silu_and_mul", "norm_gated", "qk_norm_rope"),
)
OPS = (
    *OPERATIONS,
    *("backward", "norm_add_norm_backward", "silu_and_mul_backward", "norm_gated_backward", "qk_norm_rope_backward"),
)
PEERS = (
    *("fusednorm", "eager", "compile", "transformers", "liger", "flashinfer", "quack", "sglang", "vllm-ir", "vllm-ops"),
    "onnxruntime",
)
#: Peers that are timed on request only: they consist of several torch operations, and tell little about a kernel.
SLOW_PEERS = ("transformers", "vllm-ir")

#: Exit statuses: the user interrupted the command; its arguments cannot be used, or nothing was measured.
INTERRUPTED, UNUSABLE = 130, 2


class UnusableError(Exception):
    """The command cannot do what its arguments say; the user reads the message."""


def is_running() -> bool:
    """Whether this process is the command ``fusednorm``, or ``python -m fusednorm``."""
    script = (getattr(sys, "argv", None) or [""])[0]
    if script == "-m":  # the module is being looked for
        return sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == ["fusednorm"] if "-m" in sys.orig_argv else False
    try:
        return Path(script).stem == "fusednorm" and b"fusednorm.__main__" in Path(script).read_bytes()
    except OSError:
        return False


def parsed(
    operations: Sequence[str] | None = None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """The parser, the arguments, and those of pytest. Ends the process after ``--help``, ``--version`` or an error.

    ``operations``: the names of all that ``bench`` times; None: they are not known yet, and any name is taken.
    """
    parser = command_line(operations)
    arguments, others = parser.parse_known_args()
    if others and arguments.command != "conformance":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.json and arguments.command not in (None, "doctor"):
        parser.error(f"--json goes after the command: {arguments.command} --json FILE")
    return parser, arguments, others


def command_line(operations: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The commands and their options; see :func:`parsed` for ``operations``."""
    parser = argparse.ArgumentParser(
        # Not "__main__.py".
        prog="fusednorm" if Path(sys.argv[0]).stem == "fusednorm" else "python -m fusednorm",
        description="Shows and tests fusednorm on this machine. Without a command it runs doctor.",
    )
    version = f"fusednorm {__version__}, specification {SPEC_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--json", action="store_true", help="doctor: print the findings as JSON")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    def command(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=more)

    findings = command("doctor", "show the backends of this machine, and which of them calls take")
    findings.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the findings as JSON")
    proved = command(
        "check",
        "compare every backend with the reference, bit for bit, at LLM shapes",
        "It takes under a minute, on a GPU longer while kernels are compiled. The exit status is 1 if any bit differs.",
    )
    proved.add_argument("--backend", metavar="NAME", help="check only this backend, or several with commas between")
    proved.add_argument("--all", action="store_true", help="print a line for each shape, with its time")
    proved.add_argument("--report", metavar="FILE", help="write the platform, its versions and all results, as JSON")
    ahead = command(
        "prewarm",
        "compile the kernels of later calls, for instance into the cache folder of a container image",
        "The kernels are stored in FUSEDNORM_CACHE_DIR for cuda, in TRITON_CACHE_DIR for Triton's backends.",
    )
    ahead.add_argument("--backend", metavar="NAME", help="compile for this backend (default: the one that calls take)")
    ahead.add_argument(
        "--hidden-sizes", nargs="+", type=_count, default=[4096], metavar="N", help="elements of a row (default: 4096)"
    )
    _tensors(ahead, "compile for")
    ahead.add_argument("--training", action="store_true", help="compile for gradients too")
    ahead.add_argument(
        "--norm-before-add", action="store_true", help="compile rms_norm_add and rms_norm_add_rms_norm too"
    )
    kit = command(
        "conformance",
        "test one backend, of fusednorm or of another package, against the specification, and print a certificate",
        "pytest gets all other arguments: -n 2, -k gradients, --certificate FILE, --everything.",
    )
    kit.add_argument("--backend", required=True, metavar="NAME", help="the backend's name, as in FUSEDNORM_BACKEND")
    beside = command(
        "compare",
        "measure the errors of every implementation on this machine in ulp, and whether its bits stay the same",
        "The exit status is 1 if fusednorm itself fails or its bits change; other implementations do not matter.",
    )
    _common(beside, PEERS, ())
    beside.add_argument(
        "--hidden-size", type=_count, default=4096, metavar="N", help="elements of a row (default 4096)"
    )
    beside.add_argument(
        "--op",
        choices=OPERATIONS,
        default="add_norm",
        metavar="OP",
        help=f"measure this operation: {', '.join(OPERATIONS)} (default: add_norm)",
    )
    speed = command(
        "bench",
        "compare fusednorm's bits, then time fusednorm, a copy, and every other implementation on this machine",
        "With --json FILE the same command continues an interrupted run.",
    )
    _common(speed, [name for name in PEERS if name != "fusednorm"], SLOW_PEERS)
    preset = speed.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_true", help="three shapes in bfloat16, forward only: about a minute")
    preset.add_argument(
        "--by-operation",
        action="store_true",
        help="a line for each operation, of 1, 32 and 512 rows of 4096: with --peers eager a few minutes",
    )
    speed.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="time these backends of fusednorm (default: the one that a call takes)",
    )
    speed.add_argument(
        "--ops",
        nargs="+",
        choices=operations,
        metavar="OP",
        help=f"time these operations: {', '.join(OPS)} (default: add_norm and backward)",
    )
    speed.add_argument("--shapes", nargs="+", type=shape, metavar="MxN", help="rows x hidden size, such as 1x4096")
    speed.add_argument(
        "--threads", type=_count, metavar="N", help="torch's number of threads, on a CPU (default: as torch chooses)"
    )
    speed.add_argument("--minutes", type=_minutes, metavar="M", help="start no further shape after M minutes")
    runs = command(
        "difference",
        "compare two runs of a model step by step: the share of equal bits",
        "The exit status is 1 if any bit differs, 2 if nothing could be compared. vLLM's log goes to standard error.",
    )
    runs.add_argument("a", type=Path, metavar="A", help="a safetensors file, or a model's folder")
    runs.add_argument("b", type=Path, metavar="B", help="the same of the other run; or vllm: its engine, of A's folder")
    runs.add_argument("--prompt", metavar="TEXT", help="run the models of two folders on this text")
    runs.add_argument("--patch", choices=("A", "B", "both"), help="let fusednorm compute the norms of these models")
    runs.add_argument("--all", action="store_true", help="print a line for each layer, not for all of them together")
    runs.add_argument("--json", dest="json_file", metavar="FILE", help="write the numbers of all layers to FILE")
    return parser


def _common(parser: argparse.ArgumentParser, peers: Sequence[str], on_request: Sequence[str]) -> None:
    """Adds the options that compare and bench share; peers that are measured on request are not by default."""
    by_default = [name for name in peers if name not in on_request]
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers,
        default=by_default,
        metavar="NAME",
        help="measure these implementations: none or some of "
        f"{', '.join(peers)} (default: {', '.join(by_default) if on_request else 'all'})",
    )
    _tensors(parser, "measure only")
    parser.add_argument("--wide", action="store_true", help="print every figure, in tables of up to 150 columns")
    parser.add_argument("--json", dest="json_file", type=writable, metavar="FILE", help="write all results to FILE")


def _tensors(parser: argparse.ArgumentParser, doing: str) -> None:
    """Adds the dtypes and the device of tensors."""
    dtypes = f"{doing} these dtypes: {', '.join(DTYPES)} (default: all)"
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, metavar="DTYPE", help=dtypes)
    parser.add_argument("--device", default="cpu", help="compute on this device, as torch names it (default: cpu)")


def shape(text: str) -> tuple[int, int]:
    """Rows and hidden size, from "1x4096"."""
    rows, _, hidden_size = text.partition("x")
    if not (rows.isdecimal() and hidden_size.isdecimal() and int(rows) and int(hidden_size)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: rows x hidden size, such as 1x4096")
    return int(rows), int(hidden_size)


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes, such as 5 or 0.5")
    return minutes


def writable(text: str) -> str:
    """Checks that a file can be written, without changing it."""
    path = Path(text)
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return text
