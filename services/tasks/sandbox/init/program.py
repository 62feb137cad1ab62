"""The processes of one run, from init's fork to the program."""

import _thread
import atexit
import json
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .namespaces import LIBC, PR_SET_DUMPABLE, clone, drop_rights, enter, fork


def set_limits(limits: dict[str, Any]) -> None:
    """What one process may use; init adds up what all of them use."""
    for name, value in (
        (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 1),
        (resource.RLIMIT_AS, 2 * limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # besides the one that watches
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
    """A script by the interpreter that already runs: that is what makes a start cheap.

    Its streams are init's own, which an interpreter has made for these numbers and nobody has used.
    """
    module = types.ModuleType("__main__")
    module.__file__ = argv[0]
    sys.modules["__main__"] = module
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]) or ".")
    random.seed()
    code = exit_code(lambda: run_script(argv[0], module))
    # As an interpreter ends: it waits for threads, and calls what was registered.
    if _thread._count():
        code = exit_code(threading._shutdown) or code  # type: ignore[attr-defined]
    if atexit._ncallbacks():
        code = exit_code(atexit._run_exitfuncs) or code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            code = code or 120
    os._exit(code & 255)


def run_script(path: str, module: types.ModuleType) -> None:
    """Its text as the module ``__main__``."""
    with open(path, "rb") as file:
        text = file.read()
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))


def exit_code(call: Callable[[], object]) -> int:
    """What an interpreter that ended with this call would exit with; an error is told on standard error."""
    try:
        call()
    except SystemExit as end:
        if isinstance(end.code, (int, type(None))):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


def watch_program(request: dict[str, Any], streams: Sequence[int], report: int) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel ends everything that the program has left."""
    drop_rights()
    # The program has the same user: it may neither read nor trace this process.
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    program = fork()
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
    """A line for init."""
    os.write(report, json.dumps(what).encode() + b"\n")


def start(request: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Start the program; gives the first process of its namespaces, and the ends of its streams and of its report."""
    inside_in, to_in = os.pipe()
    from_out, inside_out = os.pipe()
    from_err, inside_err = os.pipe()
    from_report, report = os.pipe()
    uid, gid = os.getuid(), os.getgid()
    first = clone()
    if first == 0:
        try:
            for fd in (to_in, from_out, from_err, from_report):
                os.close(fd)
            enter(uid, gid, request["limits"], request["prepares"])
            watch_program(request, (inside_in, inside_out, inside_err), report)
        except BaseException as error:  # noqa: BLE001
            say(report, {"failed": str(error)})
        os._exit(1)
    for fd in (inside_in, inside_out, inside_err, report):
        os.close(fd)
    return first, to_in, from_out, from_err, from_report
