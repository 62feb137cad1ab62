"""The process that computes rewards: it reads jobs and writes results, one at a time.

Messages are msgpack in frames (``worker/frames.py``). First the worker reports whether it is cut off
from the network. It answers each job twice: when it has found the function (its import may take seconds, once), and with the
result of the call. A job with ``only_find`` asks for the first answer alone, and whether the function takes such arguments.
The process itself limits memory, files and CPU time; the parent enforces the wall-clock limit by a kill.

All async functions run in one event loop, one after the other, so that a client of a judge can keep its connections.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import inspect
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any, Final, get_args

import msgpack

from gspo_services.shared.runtime.user_modules import import_named
from gspo_services.tasks.reward_worker.failures import described, import_failure
from gspo_services.tasks.reward_worker.forms import FORMS, NoRewardError, called_with, require_fitting
from gspo_services.tasks.reward_worker.groups import arguments_of, group_outcome, require_comparison
from gspo_services.tasks.reward_worker.isolation import isolate
from gspo_services.tasks.worker.failures import cut, is_a
from gspo_services.tasks.worker.frames import FrameSocket
from gspo_services.tasks.worker.limits import allow_cpu
from gspo_services.tasks.worker.reward_value import UnscoredError, UnscoredReason, outcome_of

_ERRNO: Final = OSError.__dict__["errno"].__get__
"""Not the attribute of a class of the user's, which may do anything."""


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
    return {"failure": "raised", "detail": cut(_way_out(error) + described(error))}


def _way_out(error: BaseException) -> str:
    """How a function may write what it needs: queues, locks and pools of processes are files, too. "" for other errors."""
    if os.environ.get("GSPO_SCRATCH") or not is_a(error, OSError) or _ERRNO(error) != errno.EFBIG:
        return ""
    return "no file may grow, and what processes share is files: set reward.scratch = true; "


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


def main(memory_bytes: int, cpu_s: int, *, network: bool, file_bytes: int) -> None:
    """Serve jobs until the parent goes away."""
    frames = FrameSocket(msgpack.packb, msgpack.unpackb)
    # Python would look for a place by writing a file, and perhaps no file may grow.
    tempfile.tempdir = folder = os.environ["TMPDIR"]
    frames.send({"not_isolated": isolate(memory_bytes, network=network, file_bytes=file_bytes)})
    jobs: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1)
    frames.listen(jobs.put, lambda: shutil.rmtree(folder, ignore_errors=True))
    # Jobs run in the main thread: math-verify's own time limit is a signal, which no other thread receives.
    loop = asyncio.Runner()
    while True:
        job = jobs.get()
        try:
            function, size = find_function(job["function"]), job["size"]
            if size is not None:
                require_comparison(job["function"], function)
        except ValueError as error:
            frames.send({"failure": "unknown_function", "detail": str(error)})
            continue
        try:
            if job["only_find"] and job["arguments"] is not None:
                require_fitting(function, job["form"], job["arguments"])
        except ValueError as error:
            frames.send({"failure": "bad_job", "detail": str(error)})
            continue
        frames.send({"found": True})
        if job["only_find"]:
            continue
        if sys.stdin.closed:  # The job before has called ``exit``.
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        allow_cpu(cpu_s)
        if job["scratch"]:
            use_scratch(job["scratch"])
        frames.send(grade(function, job["arguments"], loop, job["form"], job["size"]))
