"""Processes that do what no honest one does: each is answered in bounded time, and nothing of it is left."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gspo_services.tasks.supervised import BadMessage, BlockingProcess, SupervisedProcess
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES
from tests.support.processes.marked import left_of, outliving

pytestmark = pytest.mark.timeout(120)
FACES = ["blocking", "async"]
LONG_S = 60.0
RAW = "import os, signal, socket, sys, time\nparent = socket.socket(fileno=os.dup(0))\nos.close(0)\n"
"""Speaks past our end of the connection."""
OURS = "import os, signal, sys\nfrom gspo_services.tasks.worker.frames import FrameSocket\nframes = FrameSocket()\n"


@dataclass
class Started:
    """A process of either face."""

    mark: str
    pid: int
    send: Callable[[bytes], None]
    receive: Callable[[float], Awaitable[bytes]]
    status: Callable[[], Awaitable[int | None]]


@asynccontextmanager
async def started(face: str, code: str) -> AsyncIterator[Started]:
    """A process that runs ``code``. At the end none is left that it has started."""
    command = [sys.executable, "-c", code]
    if face == "blocking":
        blocking = BlockingProcess(command, os.environ)
        mark = blocking._mark
        try:
            yield Started(
                mark, blocking.pid, lambda body: blocking.send(body, LONG_S),
                lambda patience_s: asyncio.to_thread(blocking.receive, patience_s),
                lambda: asyncio.to_thread(blocking.status, 1.0),
            )  # fmt: skip
        finally:
            await asyncio.to_thread(blocking.close)
            blocking.close()
    else:
        process = SupervisedProcess()
        mark = process.mark
        try:
            await process.start_to_talk(command, os.environ)
            assert process.pid is not None
            yield Started(
                mark, process.pid, process.send,
                lambda patience_s: asyncio.wait_for(process.receive(), patience_s), process.status,
            )  # fmt: skip
        finally:
            await process.end()
            await process.end()
    assert outliving(left_of(mark)) == []


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("code", "error", "text", "status"),
    [
        ("parent.sendall(b'\\xff' * 64); signal.pause()", BadMessage, "4294967295 bytes, 4194304 allowed", None),
        ("parent.sendall(b'\\0\\0\\0\\x09half'); os._exit(3)", ConnectionError, "has ended", 3),
        ("parent.sendall(b'\\0\\0'); os._exit(0)", ConnectionError, "has ended", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", ConnectionError, "has ended", -9),
        ("parent.close(); signal.pause()", ConnectionError, "has ended", None),
        ("raise SystemExit('cannot')", ConnectionError, "has ended", 1),
    ],
    ids=["giant", "mid-message", "mid-length", "killed", "closed", "exit"],
)
async def test_what_is_no_message_is_an_error_of_the_connection(
    face: str, code: str, error: type[Exception], text: str, status: int | None
) -> None:
    async with started(face, RAW + code) as process:
        with pytest.raises(error, match=text):
            await process.receive(LONG_S)
        assert await process.status() == status


@pytest.mark.parametrize("face", FACES)
async def test_a_message_may_have_the_limit_and_come_in_pieces(face: str) -> None:
    whole = f"body = b'x' * {MAX_MESSAGE_BYTES}\nwhole = len(body).to_bytes(4, 'big') + body\n"
    pieces = "for at in range(0, len(whole), 99_991):\n    parent.sendall(whole[at:at + 99_991])\n"
    async with started(face, RAW + whole + pieces + "signal.pause()") as process:
        assert await process.receive(LONG_S) == b"x" * MAX_MESSAGE_BYTES


@pytest.mark.parametrize("face", FACES)
async def test_a_message_that_comes_byte_by_byte_has_no_more_time_than_another(face: str) -> None:
    drips = "parent.sendall((2000).to_bytes(4, 'big'))\nwhile True:\n    parent.sendall(b'x')\n    time.sleep(0.05)\n"
    async with started(face, RAW + drips) as process:
        with pytest.raises(TimeoutError):
            await process.receive(1.0)


async def test_a_process_that_reads_nothing_holds_nobody_up() -> None:
    process = BlockingProcess([sys.executable, "-c", RAW + "signal.pause()"], os.environ)
    try:
        with pytest.raises(TimeoutError):
            process.send(bytes(MAX_MESSAGE_BYTES), 0.2)
    finally:
        process.close()


@pytest.mark.parametrize("face", FACES)
async def test_nothing_is_left_of_a_process_that_forks_flees_and_ignores_signals(face: str) -> None:
    code = """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
ready, tell = os.pipe()
for flees in (False, True):
    forked = os.fork()
    if forked == 0:
        if flees:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(tell, b"x")
        signal.pause()
os.waitpid(forked, 0)  # Of the one that flees: what is between is gone.
seen = 0
while seen < 2:
    seen += len(os.read(ready, 2))
parent.sendall(b"\\0\\0\\0\\x01r")
signal.pause()
"""
    async with started(face, RAW + code) as process:
        assert await process.receive(LONG_S) == b"r"
        assert len(left_of(process.mark)) == 3


@pytest.mark.parametrize("face", FACES)
async def test_a_fork_that_lives_on_does_not_keep_the_connection(face: str) -> None:
    code = "if os.fork() == 0:\n    os.setsid()\n    signal.pause()\nos._exit(5)\n"
    async with started(face, OURS + code) as process:
        with pytest.raises(ConnectionError):
            await process.receive(LONG_S)
        assert await process.status() == 5


@pytest.mark.parametrize("face", FACES)
async def test_what_it_reads_and_prints_is_not_the_connection(face: str) -> None:
    code = "read = sys.stdin.read()\nfor _ in range(20):\n    os.write(1, bytes(2**20))\n    os.write(2, bytes(2**20))\n"
    async with started(face, OURS + code + "frames.send({'read': read})\nsignal.pause()\n") as process:
        assert await process.receive(LONG_S) == b'{"read": ""}'


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("body", [b"\xff{", b"", b'{"a": '])
async def test_a_process_ends_at_once_when_it_is_sent_what_is_no_message(face: str, body: bytes) -> None:
    async with started(face, OURS + "frames.listen(print)\nframes.send({})\nwhile True:\n    pass\n") as process:
        await process.receive(LONG_S)
        process.send(body)
        with pytest.raises(ConnectionError):
            await process.receive(LONG_S)
        assert await process.status() == -signal.SIGKILL, "with its group"


@pytest.mark.parametrize("face", FACES)
async def test_a_process_that_needs_too_much_memory_fails_alone(face: str) -> None:
    limits = "from gspo_services.tasks.worker.limits import limit_process\nlimit_process({'memory_bytes': 2**29})\n"
    code = "try:\n    kept = bytes(2**30)\nexcept MemoryError:\n    os._exit(6)\n"
    async with started(face, OURS + limits + code) as process:
        with pytest.raises(ConnectionError):
            await process.receive(LONG_S)
        assert await process.status() == 6


BUSY = """
import os, sys
from gspo_services.tasks.worker.frames import FrameSocket
FrameSocket().listen(print)
child = os.fork()
if child:
    open(sys.argv[1], "w").write(f"{os.getpid()} {child}")
while True:
    pass
"""
PARENT = """
import asyncio, os, signal, sys
from gspo_services.tasks.supervised import BlockingProcess, SupervisedProcess

async def main(command):
    process = SupervisedProcess()
    await process.start_to_talk(command, os.environ)
    await process.wait()

command = [sys.executable, "-c", sys.argv[2], sys.argv[3]]
if sys.argv[1] == "async":
    asyncio.run(main(command))
process = BlockingProcess(command, os.environ)
signal.pause()
"""


@pytest.mark.parametrize("face", FACES)
async def test_a_parent_that_is_killed_leaves_nothing_behind(face: str, tmp_path: Path) -> None:
    fifo = tmp_path / "pids"
    os.mkfifo(fifo)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, face, BUSY, str(fifo))
    pids = (await asyncio.to_thread(fifo.read_text)).split()
    parent.kill()
    await parent.wait()
    processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=LONG_S)
    assert (len(pids), [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]) == (2, [])


async def test_a_process_that_is_ended_while_it_starts_is_none() -> None:
    process = SupervisedProcess()

    async def end_meanwhile() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(process.start_to_talk([sys.executable, "-c", "input()"], os.environ), name="starting")
            await asyncio.sleep(0)
            await process.end()

    with pytest.raises(ExceptionGroup) as caught:
        await end_meanwhile()
    assert caught.group_contains(ConnectionAbortedError, match="ended while it started")
    assert outliving(left_of(process.mark)) == []


async def test_a_start_that_is_cut_off_leaves_no_process() -> None:
    process = SupervisedProcess()
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(process.start_to_talk([sys.executable, "-c", "input()"], os.environ))
        for _ in range(3):
            await asyncio.sleep(0)
        starting.cancel()
    assert starting.cancelled()
    await process.end()
    assert outliving(left_of(process.mark)) == []


def test_a_program_that_there_is_not_leaves_no_connection() -> None:
    async def start() -> None:
        process = SupervisedProcess()
        try:
            await process.start_to_talk(["/no/such/program"], os.environ)
        finally:
            await process.end()

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        BlockingProcess(["/no/such/program"], os.environ)
    with pytest.raises(FileNotFoundError):
        asyncio.run(start())
    assert len(os.listdir("/proc/self/fd")) == before
