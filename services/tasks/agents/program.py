"""Runs agents that are programs in any language: one process for each episode, which writes its reward into a file."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gspo_services.shared.runtime.user_modules import users_folder
from gspo_services.tasks.agents.options import (
    UserProcessOptions,
    process_limits,
    temporary_folder,
    user_environment,
    worker_command,
)
from gspo_services.tasks.agents.output import UserOutput
from gspo_services.tasks.agents.results import AgentFailure, AgentResult, AgentTask, answered, failed
from gspo_services.tasks.json_rewards import MAX_ANSWER_BYTES
from gspo_services.tasks.supervised import SupervisedProcess

_NOT_FOUND: Final = 127


class AgentProgram:
    """Solves as many episodes at a time as processes are allowed; an episode waits while all run."""

    def __init__(
        self,
        command: Sequence[str],
        options: UserProcessOptions | None = None,
        *,
        num_processes: int = 16,
        output: UserOutput | None = None,
    ) -> None:
        """``command``: the program and its arguments. It runs in the configuration's folder, with these variables:

        OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, GSPO_MODEL and GSPO_SEED; GSPO_TASK, the path
        of the task (JSON); GSPO_RESULT, the path where it writes its reward (JSON): a number, or a map of named components.
        """
        if not command:
            raise ValueError("the command of an agent's program is empty: name a program")
        self._command = list(command)
        self._options = UserProcessOptions() if options is None else options
        self._output = UserOutput() if output is None else output
        self._free = asyncio.Semaphore(num_processes)

    async def solve(self, task: AgentTask) -> AgentResult:
        """The result of one episode. A cancelled call, like a deadline, ends the program and all that it has started.

        waits for:    the end of another episode, then at most deadline_s
        unblocked by: the program's end; the deadline, which kills
        """
        async with self._free:
            async with user_environment(self._options, own_python=False) as environment, temporary_folder() as folder:
                return await self._run(task, environment, folder)

    async def _run(self, task: AgentTask, environment: dict[str, str], folder: Path) -> AgentResult:
        task_path, result_path = folder / "task.json", folder / "result.json"
        task_path.write_bytes(msgspec.json.encode(task.task))
        environment = environment | {
            "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "GSPO_MODEL": task.model,
            "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": task.api_key,
            "GSPO_SEED": str(task.seed), "GSPO_TASK": str(task_path), "GSPO_RESULT": str(result_path),
        }  # fmt: skip
        settings = json.dumps({"program": self._command, "limits": process_limits(self._options), "parent": os.getpid()})
        process = SupervisedProcess(lambda text: self._output.write(f"program {process.pid}", text))
        in_time = True
        try:
            await process.start(worker_command(sys.executable, settings), environment, folder=users_folder())
            async with asyncio.timeout(task.deadline_s):
                await process.wait()
        except TimeoutError:
            in_time = False
        except OSError as error:
            return failed("not_started", f"the program cannot be started: {error}")
        finally:
            await process.end()
        if not in_time:
            return failed("deadline", f"the program was not done after {task.deadline_s} s{_last_words(process)}")
        return self._result(process, result_path)

    def _result(self, process: SupervisedProcess, path: Path) -> AgentResult:
        if process.returncode != 0:
            reason: AgentFailure = "not_started" if process.returncode == _NOT_FOUND else "crashed"
            return failed(reason, f'"{self._command[0]}" ended with {process.ended_as()}{_last_words(process)}')
        try:
            body = read_small_file(path)
        except OSError as error:
            return failed(
                "no_result", f"the program wrote no reward to GSPO_RESULT ({error.strerror}){_last_words(process)}"
            )
        return answered(body, "what the program wrote to GSPO_RESULT", self._options.weights)


def read_small_file(path: Path) -> bytes:
    """At most ``MAX_ANSWER_BYTES`` and one more of a regular file, which the user's code made. Raises: OSError."""
    # A link could lead to any file of ours, and a FIFO would hold this process up.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")
        return file.read(MAX_ANSWER_BYTES + 1)


def _last_words(process: SupervisedProcess) -> str:
    return f"; its last output:\n{process.tail}" if process.tail else ""
