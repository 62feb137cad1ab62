"""Reward functions that misbehave, each in its own way. Reward workers import them by name."""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def length(text: str) -> float:
    sys.stdout.write("reward code prints what it likes\n")
    sys.stdout.flush()
    return float(len(text))


def process_id() -> int:
    return os.getpid()


def hang() -> float:
    while True:
        time.sleep(3600)


def burn() -> float:
    while True:
        pass


def crash() -> float:
    os._exit(3)


def allocate(num_bytes: int) -> float:
    return float(len(bytearray(num_bytes)))


def refuse(text: str) -> float:
    raise KeyError(text)


def not_a_number() -> float:
    return float("nan")


def infinite() -> float:
    return float("inf")


def words() -> str:
    return "one"


def be_killed() -> float:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    return hang()


LOOPS: list[asyncio.AbstractEventLoop] = []
LEFT: list["asyncio.Task[None]"] = []


async def loops() -> dict[str, float]:
    """How many jobs ran in this loop before, how many tasks they left to it, and how many of them ended. Leaves one more."""
    same = sum(loop is asyncio.get_running_loop() for loop in LOOPS)
    answer = {"before": float(same), "left": len(asyncio.all_tasks()) - 1.0, "ended": float(sum(t.done() for t in LEFT))}
    LOOPS.append(asyncio.get_running_loop())
    LEFT.append(asyncio.get_running_loop().create_task(wait_for_ever()))
    await asyncio.sleep(0)
    return answer


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def leave() -> float:
    sys.exit(1)


def leave_as_in_a_shell() -> float:
    """The built-in ``exit`` also closes stdin."""
    exit(3)


def characters_of_stdin() -> float:
    return float(len(sys.stdin.read()))


async def leave_later() -> float:
    await asyncio.sleep(0)
    sys.exit(2)


async def cancel_itself() -> float:
    raise asyncio.CancelledError


def close_the_pipe() -> float:
    os.closerange(3, 64)
    return 1.0


def connect(host: str, port: int) -> float:
    with socket.create_connection((host, port), timeout=60):
        return 1.0


def write(num_bytes: int) -> float:
    with tempfile.TemporaryFile(dir="/tmp", buffering=0) as file:
        return float(file.write(bytes(num_bytes)))


def environment_value(variable: str) -> float:
    return float(os.environ[variable])


def environment(variable: str) -> float:
    return float(variable in os.environ)


def open_files() -> float:
    """The number of open sockets and files, without the three standard ones and the socket to the parent."""
    number = 0
    for descriptor in range(4, 1024):
        with suppress(OSError):
            os.fstat(descriptor)
            number += 1
    return float(number)


def new_privileges() -> float:
    """The no_new_privs flag of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("NoNewPrivs:")))


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def parts(**values: object) -> dict[str, object]:
    """Named components, as they were asked for."""
    return values


async def graded_row(completion: str, task: dict[str, object]) -> dict[str, float]:
    level = task["level"]
    assert isinstance(level, int)
    return {"right": float(completion.endswith(str(task["answer"]))), "short": float(len(completion)), "level": float(level)}


async def later(text: str) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"length": float(len(text))}


async def fail_later() -> float:
    await asyncio.sleep(0)
    raise KeyError("later")


def nan_part() -> dict[str, float]:
    return {"right": 1.0, "style": float("nan")}


def write_in_scratch(num_bytes: int) -> dict[str, float]:
    """A file where temporary files go; ``found`` is how many were there before."""
    folder = Path(tempfile.gettempdir())
    found = len(list(folder.iterdir()))
    with open(folder / "file", "wb", buffering=0) as file:
        written = file.write(bytes(num_bytes))
    return {"found": float(found), "written": float(written), "named": float(os.environ["GSPO_SCRATCH"] == str(folder))}


def share_a_queue() -> float:
    """What processes share is a file; graders of programs share queues."""
    queue = multiprocessing.Queue()
    queue.close()
    return 1.0


def daemonise() -> float:
    """A process that leaves the worker's group."""
    return float(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)


def answer_falsely(body: bytes) -> float:
    """Write into the socket to the parent."""
    for descriptor in range(3, 16):
        with suppress(OSError):
            os.write(descriptor, body)
    return hang()


def beside(completions: list[str], task: dict, rewards: list[float]) -> list[dict[str, float]]:
    """What an answer is worth alone, and how many others are longer; ``task`` may ask for something else."""
    assert len(completions) == len(rewards)
    found = [
        {"alone": alone, "shorter": float(sum(len(other) > len(text) for other in completions))}
        for text, alone in zip(completions, rewards, strict=True)
    ]
    return found[: task.get("most", len(found))]


def rank(completions: list[str], task: dict) -> list[int]:
    """The place of each answer in the order of the alphabet."""
    order = sorted(completions)
    return [order.index(text) for text in completions]


async def rank_later(completions: list[str], **more: object) -> list[int]:
    await asyncio.sleep(0)
    return [len(completions), *[0] * (len(completions) - 1)] if sorted(more) == ["rewards", "task"] else []


def as_it_says(completions: list[str], task: dict) -> object:
    """Return what the first answer is in Python."""
    return eval(completions[0])


def of_others(texts: list[str]) -> list[float]:
    return [0.0 for _ in texts]


def hang_together(completions: list[str], task: dict) -> list[float]:
    return [hang() for _ in completions]


def too_few(completions: list[str], task: dict) -> list[float]:
    return [0.0 for _ in completions[1:]]


def answer_together(completions: list[str], task: dict) -> list[float]:
    return [answer_falsely(task["body"])]


def parity(completion: str, task: dict[str, Any]) -> float:
    """1 for a number that is as ``kind`` says, even or odd."""
    text = completion.strip()
    return float(text.isascii() and text.isdigit() and int(text) % 2 == (task["kind"] == "odd"))
