"""Agents that behave and agents that misbehave, each in its own way. Workers import them by name, under any Python."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gspo.tasks.agents import Episode


async def act(episode: Episode) -> Any:
    """The agent of most tests: the task says what it does."""
    doing: Callable[[Episode], Awaitable[Any]] = globals()[str(episode.task["do"])]
    return await doing(episode)


def act_in_thread(episode: Episode) -> Any:
    doing: Callable[[Episode], Any] = globals()[str(episode.task["do"])]
    return doing(episode)


async def answer(episode: Episode) -> Any:
    return episode.task["value"]


async def addresses(episode: Episode) -> "dict[str, float]":
    assert (episode.base_url, episode.api_key, episode.model) == ("http://127.0.0.1:9/v1", "episode-key", "policy")
    assert [episode.role(name).api_key for name in episode.roles] == ["episode-key.white", "episode-key.black"]
    return {"seed": episode.seed, "in_time": float(0 < episode.remaining_s <= 60)}


_MEETINGS: dict[int, asyncio.Barrier] = {}
_THREADS_MEET = threading.Barrier(100)


async def meet(episode: Episode) -> float:
    """Wait until as many episodes of this worker wait here."""
    await _MEETINGS.setdefault(episode.task["number"], asyncio.Barrier(episode.task["number"])).wait()
    return float(os.getpid())


async def process_id(episode: Episode) -> float:
    return float(os.getpid())


async def fail(episode: Episode) -> float:
    return await fail_deeper()


async def fail_deeper() -> float:
    raise KeyError("the user's own mistake")


async def fail_in_a_library(episode: Episode) -> float:
    return library_call(10)


def library_call(depth: int) -> float:
    """As a library, which has more frames than are shown."""
    return library_call(depth - 1) if depth else 1 / 0


async def leave(episode: Episode) -> float:
    sys.exit(3)


async def crash(episode: Episode) -> float:
    os._exit(7)


async def crash_in_c(episode: Episode) -> float:
    import ctypes

    return float(ctypes.string_at(0)[0])


async def wait_for_ever(episode: Episode) -> float:
    await asyncio.Event().wait()
    return 0.0


async def wait_and_refuse_to_end(episode: Episode) -> float:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def spin(episode: Episode) -> float:
    while True:
        pass


async def import_slowly(episode: Episode) -> float:
    """As a library that is imported where it is first used."""
    path = Path(os.environ["GSPO_SCRATCH"], "slow_to_import.py")
    path.write_text("import time\ntime.sleep(2)\n")  # noqa: ASYNC240
    spec = importlib.util.spec_from_file_location("slow_to_import", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return 1.0


async def block(episode: Episode) -> float:
    time.sleep(3600)  # noqa: ASYNC251
    return 0.0


async def spin_in_c(episode: Episode) -> float:
    return float(str(len(str(9 ** (9**9)))))


async def say_where_and_spin(episode: Episode) -> float:
    with open(episode.task["fifo"], "w") as fifo:  # noqa: ASYNC230
        fifo.write(str(os.getpid()))
    while True:
        pass


async def allocate(episode: Episode) -> float:
    return float(len(bytearray(64 * 1024**3)))


async def burn_in_thread(episode: Episode) -> float:
    await asyncio.get_running_loop().run_in_executor(None, _burn)
    return 0.0


def _burn() -> None:
    while True:
        sum(range(1000))


async def write_file(episode: Episode) -> float:
    folder = str(episode.task.get("folder") or os.environ["TMPDIR"])
    with open(os.path.join(folder, "gspo-written-by-an-agent"), "wb", buffering=0) as file:  # noqa: ASYNC230
        return float(file.write(bytes(int(str(episode.task["num_bytes"])))))


async def open_many(episode: Episode) -> float:
    kept = [socket.socketpair() for _ in range(5000)]
    return float(len(kept))


async def print_lines(episode: Episode) -> float:
    print(f"seed {episode.seed} says", "hello")
    await asyncio.sleep(0)
    print("and more", end="")
    return 1.0


async def print_endlessly(episode: Episode) -> float:
    line = "x" * 9_999
    for _ in range(3_000):
        print(line)
    return 1.0


async def flood(episode: Episode) -> float:
    """1 GB past Python's own standard output."""
    piece = bytes(1_000_000)
    for _ in range(1_000):
        os.write(1, piece)
    return 1.0


async def write_garbage(episode: Episode) -> float:
    for descriptor in range(3, 64):
        try:
            socket.socket(fileno=os.dup(descriptor)).sendall(b"\xff" * 64)
        except OSError:
            continue
    await asyncio.Event().wait()
    return 0.0


async def say(episode: Episode) -> float:
    """Send any message to the parent under our feet."""
    frames = episode._steps.record._frames  # type: ignore[attr-defined]
    frames.send(episode.task["message"])
    await asyncio.Event().wait()
    return 0.0


async def say_many(episode: Episode) -> float:
    """Steps that follow each other without waiting for their record."""
    frames = episode._steps.record._frames  # type: ignore[attr-defined]
    for ordinal in range(int(episode.task["times"])):
        frames.send({**episode.task["message"], "ordinal": ordinal})
    await asyncio.Event().wait()
    return 0.0


async def fork_and_return(episode: Episode) -> float:
    """The child goes on as if it were the worker, until it speaks."""
    child = os.fork()
    if child == 0:
        return 2.0
    return 1.0 + os.waitpid(child, 0)[1]  # noqa: ASYNC222


async def daemonise(episode: Episode) -> float:
    """A process that leaves the group, and holds all that it inherited."""
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True, close_fds=False
    )
    return float(child.pid)


async def leave_tasks(episode: Episode) -> float:
    """Tasks that nobody waits for."""
    keep.extend(asyncio.ensure_future(asyncio.Event().wait()) for _ in range(3))  # noqa: TID251
    await asyncio.sleep(0)
    return float(len(asyncio.all_tasks()))


keep: "list[Any]" = []


async def without_our_packages(episode: Episode) -> float:
    missing = [name for name in ("msgpack", "msgspec", "aiohttp") if importlib.util.find_spec(name) is None]
    print("prefix", sys.prefix)
    return float(len(missing))


# --- steps -------------------------------------------------------------------------------------------------------------


async def two_steps(episode: Episode) -> "dict[str, float]":
    replayed = float(episode.is_replay)
    first = await episode.step("first", note, episode.task["notes"], "first", 1)
    second = await episode.step("second", note_later, episode.task["notes"], "second", first["value"] + 1)
    return {
        "first": first["value"],
        "second": second["value"],
        "was_replay": replayed,
        "is_replay": float(episode.is_replay),
    }


async def other_steps(episode: Episode) -> "dict[str, float]":
    first = await episode.step("first", note, episode.task["notes"], "first", 1)
    other = await episode.step("other", note, episode.task["notes"], "other", 20)
    third = await episode.step("third", note, episode.task["notes"], "third", 30)
    return {"first": first["value"], "other": other["value"], "third": third["value"]}


def steps_in_thread(episode: Episode) -> float:
    first = episode.step_now("first", note, episode.task["notes"], "first", 1)
    second = episode.step_now("second", note, episode.task["notes"], "second", first["value"] + 1)
    return float(second["value"])


def note(path: str, text: str, value: int) -> "dict[str, int]":
    """A side effect: one more line in a file."""
    with open(path, "a") as file:
        file.write(text + "\n")
    return {"value": value}


async def note_later(path: str, text: str, value: int) -> "dict[str, int]":
    await asyncio.sleep(0)
    return note(path, text, value)


async def steps_at_once(episode: Episode) -> float:
    await asyncio.gather(episode.step("a", asyncio.sleep, 0, 1), episode.step("b", asyncio.sleep, 0, 2))
    return 0.0


async def step_of_an_object(episode: Episode) -> float:
    await episode.step("make", object)
    return 0.0


async def step_too_large(episode: Episode) -> float:
    await episode.step("read", lambda: "x" * 2_000_000)
    return 0.0


async def step_fails_once(episode: Episode) -> float:
    async def fetch(number: int) -> int:
        if number == 0:
            raise OSError("the network is gone")
        return number

    for number in range(3):
        try:
            return float(await episode.step("fetch", fetch, number))
        except OSError:
            continue
    return 0.0


def nap_in_thread(episode: Episode) -> float:
    time.sleep(0.3)
    return float(threading.get_ident() != threading.main_thread().ident)


def meet_in_thread(episode: Episode) -> float:
    """Wait until a hundred threads of this worker wait here."""
    _THREADS_MEET.wait()
    return float(threading.get_ident() != threading.main_thread().ident)


def process_id_in_thread(episode: Episode) -> float:
    return float(os.getpid())


def hang_in_thread(episode: Episode) -> float:
    threading.Event().wait()
    return 0.0


def leave_from_thread(episode: Episode) -> float:
    sys.exit(4)


class Solver:
    """An agent may be any callable."""

    async def __call__(self, episode: Episode) -> float:
        return 0.5


solver = Solver()
not_a_function = 5
