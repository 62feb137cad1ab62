"""The processes of one run, from the first one of its namespaces to the program."""

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

from .filter import forbid
from .namespaces import LIBC, PR_SET_DUMPABLE, drop_rights, fork

STACK_BYTES = 8 << 20
"""Of the first thread, as almost everywhere: a program must not crash on one machine and end well on another."""


def set_limits(limits: dict[str, Any]) -> None:
    """What one process may use; init adds up what all of them use. None is left as this machine has it.

    Raises: OSError for a limit that this machine does not give.
    """
    for name, value in (
        ("CPU", int(limits["cpu_s"]) + 1),
        ("AS", 2 * limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("NPROC", limits["processes"] + 1),  # besides the one that watches
    ):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        except ValueError as error:
            most = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
            raise OSError(f"a run needs {value} as its RLIMIT_{name}, and this machine gives {most} (ulimit -H)") from error
    for name, most in (("CORE", 0), ("MSGQUEUE", 0), ("NICE", 0), ("RTPRIO", 0), ("SIGPENDING", 1024), ("MEMLOCK", 8 << 20)):
        value, _ = within_hard_limit("RLIMIT_" + name, most)
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    resource.setrlimit(resource.RLIMIT_STACK, within_hard_limit("RLIMIT_STACK", STACK_BYTES))


def within_hard_limit(name: str, most: int) -> tuple[int, int]:
    """``most``, or what this machine's hard limit leaves of it; and that limit."""
    hard = resource.getrlimit(getattr(resource, name))[1]
    return (most if hard == resource.RLIM_INFINITY else min(most, hard)), hard


def prepare(streams: Sequence[int], limits: dict[str, Any]) -> None:
    """Everything of this process that is not the program's to choose, but for open files. Raises: OSError."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.setsid()
    os.chdir("/tmp")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    set_limits(limits)


def become(argv: list[str], python: bool) -> NoReturn:
    """The program itself, in the last of the processes."""
    os.closerange(3, 1024)
    if python:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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


def watch_program(request: dict[str, Any], streams: Sequence[int], report: int, filter_steps: bytes) -> NoReturn:
    """Process 1 of the namespace: when it ends, the kernel ends everything that the program has left.

    The program shares its user and its namespace. So it has no handler of any signal, or a program could call it.
    """
    drop_rights()
    # The program may neither read nor trace this process.
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    forbid(filter_steps)
    program = fork()
    if program == 0:
        try:
            prepare(streams, request["limits"])
        except BaseException as error:  # noqa: BLE001
            say(report, {"failed": str(error)})
            os._exit(1)
        try:
            become(request["argv"], request["python"])
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"cannot run {request['argv'][0]}: {error}\n".encode())
            os._exit(127)
    try:
        for stream in streams:
            os.close(stream)
        cpu_s = 0.0
        while True:
            pid, status, usage = os.wait4(-1, 0)
            cpu_s += usage.ru_utime + usage.ru_stime
            if pid == program:
                say(report, {"status": status, "cpu_s": cpu_s})
                os._exit(0)
    finally:
        # Whatever ends this process now is the program's doing: ``main.run`` takes it so where no status is said.
        os._exit(1)


def say(report: int, what: dict[str, Any]) -> None:
    """A line for init."""
    os.write(report, json.dumps(what).encode() + b"\n")
