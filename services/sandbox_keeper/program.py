"""The processes of one run, from the keeper's fork to the program."""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from .namespaces import LIBC, PR_SET_DUMPABLE, drop_rights, enter_namespaces


def set_limits(limits: dict[str, Any]) -> None:
    """What one process may use; the keeper adds up what all of them use."""
    for name, value in (
        (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 1),
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 2),  # besides the two that watch
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def become(argv: list[str], python: bool, streams: Sequence[int], limits: dict[str, Any]) -> NoReturn:
    """The program itself, in the last of the processes."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.setsid()
    os.chdir("/tmp")
    set_limits(limits)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if python:
        run_python(argv)
    os.execvpe(argv[0], argv, os.environ)


def run_python(argv: list[str]) -> NoReturn:
    """A script by the interpreter that already runs: that is what makes a start cheap."""
    import runpy

    code = 1
    try:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]) or ".")
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, (int, type(None))):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
        os._exit(code & 255)


def first_process(request: dict[str, Any], streams: Sequence[int], report: int) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel ends everything that the program has left."""
    drop_rights()
    # The program has the same user: it may neither read nor trace this process.
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    program = os.fork()
    if program == 0:
        try:
            become(request["argv"], request["python"], streams, request["limits"])
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"cannot run {request['argv'][0]}: {error}\n".encode())
            os._exit(127)
    for stream in streams:
        os.close(stream)
    cpu_s = 0.0
    while True:
        pid, status, usage = os.wait4(-1, 0)
        cpu_s += usage.ru_utime + usage.ru_stime
        if pid == program:
            say(report, {"status": status, "cpu_s": cpu_s})
            os._exit(0)


def say(report: int, what: dict[str, Any]) -> None:
    """A line for the keeper."""
    os.write(report, json.dumps(what).encode() + b"\n")


def start(request: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Start the program; gives the process that makes its namespaces, and the ends of its streams and of its report."""
    inside_in, to_in = os.pipe()
    from_out, inside_out = os.pipe()
    from_err, inside_err = os.pipe()
    from_report, report = os.pipe()
    maker = os.fork()
    if maker == 0:
        code = 0
        try:
            for fd in (to_in, from_out, from_err, from_report):
                os.close(fd)
            enter_namespaces(request["limits"], request["prepares"])
            first = os.fork()
            if first == 0:
                first_process(request, (inside_in, inside_out, inside_err), report)
            # Ending here gives the first process to the keeper, which adopts orphans.
            say(report, {"first": first})
        except BaseException as error:  # noqa: BLE001
            say(report, {"failed": str(error)})
            code = 1
        os._exit(code)
    for fd in (inside_in, inside_out, inside_err, report):
        os.close(fd)
    return maker, to_in, from_out, from_err, from_report
