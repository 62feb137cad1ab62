"""The process that computes rewards: it reads jobs from stdin and writes results to the former stdout, one at a time.

Each message is a 4-byte big-endian length and that many bytes of msgpack. First the worker reports whether it is cut off
from the network. It answers each job twice: when it has found the function (its import may take seconds, once), and with the
result of the call. A job with ``only_find`` asks for the first answer alone, and whether the function takes such arguments.
The process itself limits memory, files and CPU time; the parent enforces the wall-clock limit by a kill.

All async functions run in one event loop, one after the other, so that a client of a judge can keep its connections.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import os
import queue
import resource
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO, Literal, get_args

import msgpack

from gspo_services.shared.runtime.user_modules import import_named
from gspo_services.tasks.reward_worker.failures import described, import_failure
from gspo_services.tasks.reward_worker.forms import FORMS, NoRewardError, called_with, require_fitting
from gspo_services.tasks.reward_worker.groups import arguments_of, group_outcome, require_comparison
from gspo_services.tasks.reward_worker.isolation import isolate
from gspo_services.tasks.worker.failures import is_a
from gspo_services.tasks.worker.reward_value import UnscoredError, UnscoredReason, outcome_of

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


def write_message(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message and flush it."""
    body = msgpack.packb(message)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    message: dict[str, Any] = msgpack.unpackb(stream.read(length))
    return message


def find_function(path: str) -> Callable[..., Any]:
    """The function at "package.module:function". Raises: ValueError when there is none, or its module raises."""
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f'"{path}" is not of the form "package.module:function"')
    try:
        # Not from its dictionary: a package such as trl.rewards imports what is asked of it.
        found = getattr(import_named(module_name), function_name, None)
    # Importing runs the user's code, which may also leave.
    except BaseException as error:
        raise ValueError(f'cannot import "{module_name}": {import_failure(error)}') from error
    if not callable(found):
        raise ValueError(f'"{module_name}" has no function called "{function_name}"')
    return found  # type: ignore[no-any-return]


def grade(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    loop: asyncio.Runner,
    form: str = "",
    size: int | None = None,
) -> dict[str, Any]:
    """Call ``function`` as its ``form`` says; an async one runs in ``loop``.

    ``size``: of the group that it compares; None: it grades one answer.

    Returns what ``outcome_of`` or ``group_outcome`` makes of its value, or {"failure": reason, "detail": text}.
    """
    try:
        named = called_with(function, form, arguments) if size is None else arguments_of(function, arguments)
        value = function(**named)
        if inspect.isawaitable(value):
            value = loop.run(_awaited(value), context=contextvars.copy_context())
    # This is the user's code, and its failure is data: also one that leaves, interrupts or cancels itself.
    except BaseException as error:  # noqa: BLE001
        return _failure(error)
    try:
        return outcome_of(FORMS[form].returned(value)) if size is None else group_outcome(value, size)
    except NoRewardError as error:
        return {"failure": "no_reward", "detail": str(error)}
    except UnscoredError as error:
        reason = error.reason if error.reason in get_args(UnscoredReason) else "raised"
        return {"failure": reason, "detail": described(error)}
    # The value's own code runs here, too.
    except BaseException as error:  # noqa: BLE001
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    if is_a(error, MemoryError):
        return {"failure": "memory", "detail": "the job needed more memory than a worker may have"}
    return {"failure": "raised", "detail": described(error)}


async def _awaited(value: Awaitable[Any]) -> Any:
    try:
        return await value
    finally:
        # What a job leaves running would take its time from the next one.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def use_scratch(folder: str) -> None:
    """Let the next job's temporary files be in ``folder``, which is removed after it."""
    os.environ["TMPDIR"] = os.environ["GSPO_SCRATCH"] = folder
    tempfile.tempdir = None


def limit_cpu_of_next_job(cpu_s: int) -> None:
    """Let the process use ``cpu_s`` more seconds; after that the kernel ends it (SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft_limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + cpu_s)


def _set_soft_limit(limit: int, value: int) -> None:
    """Set a limit of this process, as far as its hard limit allows."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _take_stdout() -> BinaryIO:
    """The pipe to the parent, where reward code cannot print: its output goes to /dev/null."""
    return _taken(sys.stdout.fileno(), "wb", os.O_WRONLY)


def _take_stdin() -> BinaryIO:
    """The pipe from the parent. ``exit`` closes stdin, and would wait for the thread that reads there."""
    return _taken(sys.stdin.fileno(), "rb", os.O_RDONLY)


def _taken(standard: int, mode: Literal["rb", "wb"], flags: int) -> BinaryIO:
    """What a standard descriptor led to; it leads to /dev/null from here on."""
    pipe = os.fdopen(os.dup(standard), mode)
    nothing = os.open(os.devnull, flags)
    os.dup2(nothing, standard)
    os.close(nothing)
    return pipe


def _read_jobs(pipe: BinaryIO, jobs: queue.Queue[dict[str, Any]], folder: str) -> None:
    """Pass on jobs; end the process, and its folder, when the parent is gone, even during a job that hangs."""
    while True:
        job = read_message(pipe)
        if job is None:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        jobs.put(job)


def main(memory_bytes: int, cpu_s: int, *, network: bool, file_bytes: int) -> None:
    """Serve jobs until the parent goes away."""
    pipe, results = _take_stdin(), _take_stdout()
    # Python would look for a place by writing a file, and perhaps no file may grow.
    tempfile.tempdir = os.environ["TMPDIR"]
    write_message(results, {"not_isolated": isolate(memory_bytes, network=network, file_bytes=file_bytes)})
    jobs: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1)
    threading.Thread(target=_read_jobs, args=(pipe, jobs, tempfile.tempdir), name="read-jobs", daemon=True).start()
    # Jobs run in the main thread: math-verify's own time limit is a signal, which no other thread receives.
    loop = asyncio.Runner()
    while True:
        job = jobs.get()
        try:
            function, size = find_function(job["function"]), job["size"]
            if size is not None:
                require_comparison(job["function"], function)
        except ValueError as error:
            write_message(results, {"failure": "unknown_function", "detail": str(error)})
            continue
        try:
            if job["only_find"] and job["arguments"] is not None:
                require_fitting(function, job["form"], job["arguments"])
        except ValueError as error:
            write_message(results, {"failure": "bad_job", "detail": str(error)})
            continue
        write_message(results, {"found": True})
        if job["only_find"]:
            continue
        if sys.stdin.closed:  # The job before has called ``exit``.
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        limit_cpu_of_next_job(cpu_s)
        if job["scratch"]:
            use_scratch(job["scratch"])
        write_message(results, grade(function, job["arguments"], loop, job["form"], job["size"]))
