"""Whatever a program does inside, the verdict is its own: it can end nobody who watches it, nor have what nothing counts."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from gspo_services.tasks.sandbox import Sandbox
from tests.sandbox.conftest import LIMITS, below, python

pytestmark = pytest.mark.sandbox


async def test_a_program_that_ends_the_first_process_of_its_namespace_by_a_signal_fails_by_itself(sandbox: Sandbox) -> None:
    """It would choose to have no score. Python's own handler of SIGINT was there to be called."""
    outcome = await python(
        sandbox,
        """
import os, signal, time
for number in [signal.SIGINT, *(set(range(1, 65)) - {9, 19, 32, 33})]:
    os.kill(1, number)
time.sleep(0.1)
print("a wrong answer")
""",
    )
    assert (outcome.exit_code, outcome.stdout) == (0, b"a wrong answer\n")


async def test_the_limits_of_the_first_process_cannot_be_lowered_until_it_dies(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os, resource
for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NOFILE"):
    try:
        resource.prlimit(1, getattr(resource, name), (0, 0))
        print("lowered")
    except PermissionError:
        print("kept")
resource.prlimit(0, resource.RLIMIT_NOFILE, (64, 64))
""",
    )
    assert (outcome.exit_code, outcome.stdout) == (0, b"kept\n" * 3)


async def test_nothing_of_whoever_started_the_sandbox_is_inherited(sandbox: Sandbox) -> None:
    """Handlers, mask, umask, limits, terminal, priority in a lack of memory: as a login has them, and not as the test's."""
    outcome = await python(
        sandbox,
        """
import os, resource, signal
print([n for n in signal.valid_signals() if signal.getsignal(n) is not signal.SIG_DFL], signal.pthread_sigmask(0, ()))
print(oct(os.umask(0)), os.getcwd(), os.getsid(0) == os.getpid())
print(resource.getrlimit(resource.RLIMIT_STACK)[0], resource.getrlimit(resource.RLIMIT_MSGQUEUE), flush=True)
for name in ("/dev/tty", "/dev/ptmx"):
    try:
        os.open(name, os.O_RDWR)
        print("opened", name, flush=True)
    except OSError:
        pass
os.execv("/bin/sh", ["sh", "-c", "trap; echo over"])
""",
    )
    lines = outcome.stdout.decode().splitlines()
    assert lines == ["[<Signals.SIGINT: 2>] set()", "0o22 /tmp True", f"{8 << 20} (0, 0)", "over"], outcome


async def test_a_program_that_the_kernel_ends_with_its_first_process_was_over_its_memory(sandbox: Sandbox) -> None:
    """That is whom the kernel may choose where the whole machine has no memory left. Nobody else can end it."""
    await sandbox.put({"script.py": b"print('began', flush=True)\nimport time\ntime.sleep(1000)"})
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(sandbox.run(["python", "script.py"], replace(LIMITS, wall_s=60)))
        # Two of bubblewrap, init, its spawner, the first process, the program.
        while len(found := below(os.getpid())) < 6:
            assert not run.done(), run
            await asyncio.sleep(0)
        os.kill(found[4], signal.SIGKILL)
    outcome = run.result()
    assert (outcome.limit, outcome.exit_code, outcome.signal) == ("memory", None, None)


async def test_buffers_of_sockets_are_memory(sandbox: Sandbox) -> None:
    text = """
import os, socket, time
for _ in range(4):
    if os.fork() == 0:
        kept = [socket.socketpair() for _ in range(100)]
        time.sleep(1000)
time.sleep(1000)
"""
    assert (await python(sandbox, text)).limit == "memory"


async def test_files_are_written_over_whatever_a_preparation_has_left(sandbox: Sandbox) -> None:
    """A pipe in a file's place would keep init waiting, and a folder or a link would make it fail."""
    text = """
import os
os.mkfifo("/sandbox/pipe")
os.mkdir("/sandbox/folder")
open("/sandbox/closed", "w").close()
os.symlink("/usr", "/sandbox/link")
os.symlink("/nowhere", "/sandbox/dangling")
for name in ("closed", "folder"):
    os.chmod("/sandbox/" + name, 0)
"""
    await sandbox.put({"prepare.py": text.encode()})
    assert (await sandbox.prepare(["python", "prepare.py"], LIMITS)).succeeded
    names = ("pipe", "folder", "closed", "link/file", "dangling")
    await sandbox.put(dict.fromkeys(names, b"ours"))
    outcome = await python(sandbox, f"for name in {names}: print(open('/sandbox/' + name).read())")
    assert outcome.stdout == b"ours\n" * 5


@pytest.mark.parametrize(
    "fills", ["open('/sandbox/all', 'wb').write(bytes(180 << 20))", "for n in range(70000): open(f'/sandbox/{n}', 'w')"]
)
async def test_a_preparation_that_leaves_no_room_has_gone_over_a_limit(sandbox: Sandbox, fills: str) -> None:
    limits = replace(LIMITS, wall_s=60, cpu_s=60, file_bytes=1 << 30, memory_bytes=512 << 20)
    await sandbox.put({"prepare.py": fills.encode()})
    assert (await sandbox.prepare(["python", "prepare.py"], limits)).limit == "file"


async def test_no_memory_can_be_had_that_stays_when_no_process_maps_it(sandbox: Sandbox) -> None:
    """Nothing would count it: files without a name, shared memory of both kinds, and what is mapped of /dev/zero."""
    outcome = await python(
        sandbox,
        """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
print([number for number in (libc.memfd_create(b"x", 0), libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600),
    libc.semget(0, 1, 0o1600)) if number >= 0])
for descriptor in (-1, os.open("/dev/zero", os.O_RDWR)):
    try:
        mmap.mmap(descriptor, 4096)
        print("mapped", descriptor)
    except OSError:
        pass
print(len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), open("/dev/zero", "rb").read(3))
""",
    )
    assert outcome.stdout.decode().splitlines() == ["[]", "4096 b'\\x00\\x00\\x00'"], outcome
