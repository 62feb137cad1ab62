"""What a hostile program tries, and that it gets nothing from it: neither another's data nor time after its end."""

import ast
import errno
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import Sandbox
from gspo_services.tasks.sandbox.walls import VARIABLES
from tests.sandbox.conftest import LIMITS, below, python

pytestmark = pytest.mark.sandbox


async def test_no_address_can_be_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = await python(
            sandbox,
            f"""
import socket
for address in (("127.0.0.1", {port}), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, timeout=2)
        print("reached", address)
    except OSError as error:
        print("refused")
""",
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.stdout.decode().splitlines() == ["refused"] * 3


async def test_nothing_of_this_machine_can_be_read_but_the_system(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key")
    outcome = await python(
        sandbox,
        f"""
import os, glob
for path in ({str(secret)!r}, "/etc/shadow", "/etc/passwd", "/root/.ssh", "/var", "/home", "/sys", "/run", {os.getcwd()!r}):
    print(os.path.exists(path))
print(sorted(os.listdir("/etc")))
print(os.listdir("/proc"), glob.glob("/proc/*/environ"))
print(sorted(os.environ))
""",
    )
    *exist, etc, processes, variables = outcome.stdout.decode().splitlines()
    assert exist == ["False"] * 9
    assert etc == "['alternatives', 'ld.so.cache']"
    assert processes == "[] []"
    assert set(ast.literal_eval(variables)) <= {*VARIABLES, "LC_CTYPE", "PWD"}


async def test_no_file_of_the_system_or_of_the_sandbox_can_be_changed(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os
ours = "/init/gspo_sandbox_init/main.py"
for path in ("/usr/x", "/usr/bin/python3", "/sandbox/script.py", "/sandbox/new", ours, "/x", "/etc/x", "/dev/x", "/proc/x"):
    try:
        open(path, "a").write("changed")
        print("changed", path)
    except OSError:
        pass
for path in ("/sandbox/script.py", "/init/gspo_sandbox_init/main.py"):
    try:
        os.unlink(path)
        print("removed", path)
    except OSError:
        pass
print("tried")
""",
    )
    assert outcome.stdout == b"tried\n"


async def test_rights_cannot_be_had_again(sandbox: Sandbox) -> None:
    """Not by namespaces of its own, in which a program is its own administrator, and not by remounting or unmounting."""
    outcome = await python(
        sandbox,
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tries(when):
    for name, call in (
        ("remount sandbox", lambda: libc.mount(b"none", b"/sandbox", b"", 32 | 4096, None)),
        ("unmount proc", lambda: libc.umount2(b"/proc", 2)),
        ("unmount tmp", lambda: libc.umount2(b"/tmp", 2)),
        ("mount proc", lambda: libc.mount(b"proc", b"/proc", b"proc", 0, None)),
        ("mount sys", lambda: libc.mount(b"sysfs", b"/tmp", b"sysfs", 0, None)),
        ("chroot", lambda: libc.chroot(b"/tmp/..") if when == "first" else 1),
        ("root", lambda: libc.setuid(0) if when == "first" else 1),
    ):
        if call() == 0:
            print(when, name)
tries("first")
uid = os.getuid()
if libc.unshare(0x10000000 | 0x20000) == 0:
    tries("in namespaces of its own")
print(os.path.exists("/proc/1"), len(os.listdir("/proc")))
try:
    open("/sandbox/script.py", "a")
    print("the sandbox can be written")
except OSError:
    pass
""",
    )
    assert outcome.stdout.decode().splitlines() == ["False 0"], outcome


async def test_a_fork_bomb_stops_at_the_limit_and_nothing_of_it_is_left(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except BlockingIOError:
    print(children)
""",
        replace(LIMITS, processes=20),
    )
    assert outcome.stdout == b"19\n"
    # Two of bubblewrap, init and its spawner.
    assert len(below(os.getpid())) == 4


async def test_memory_of_all_processes_together_is_bounded(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1)) * (40 << 20)
        time.sleep(1000)
time.sleep(1000)
""",
    )
    assert outcome.limit == "memory"
    assert outcome.wall_s < 9


async def test_one_process_cannot_reserve_without_end(sandbox: Sandbox) -> None:
    outcome = await python(sandbox, "bytearray(1 << 30)")
    assert outcome.exit_code == 1
    assert b"MemoryError" in outcome.stderr


@pytest.mark.parametrize("stream", [1, 2])
async def test_a_flood_of_output_is_cut_at_the_limit(sandbox: Sandbox, stream: int) -> None:
    outcome = await python(
        sandbox, f"import os\nwhile True: os.write({stream}, b'x' * 65536)", replace(LIMITS, output_bytes=100_000)
    )
    assert outcome.limit == "output"
    assert len(outcome.stdout if stream == 1 else outcome.stderr) == 100_000


async def test_files_end_at_their_limits(sandbox: Sandbox) -> None:
    limits = replace(LIMITS, file_bytes=1 << 20, scratch_bytes=4 << 20)
    assert (await python(sandbox, "open('/tmp/a', 'wb').write(bytes(2 << 20))", limits)).limit == "file"
    outcome = await python(sandbox, "for n in range(9): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))", limits)
    assert b"No space left" in outcome.stderr
    outcome = await python(sandbox, "for n in range(9): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))", limits)
    assert b"No space left" in outcome.stderr
    empty = (
        "import os\ntry:\n  for n in range(10 ** 5): os.mknod(f'/tmp/{n}')\nexcept OSError as error: print(n, error.errno)"
    )
    number, error = (await python(sandbox, empty, limits)).stdout.split()
    assert int(number) <= (4 << 20) // 4096
    assert int(error) == errno.ENOSPC


async def test_time_ends_also_for_programs_that_sleep_and_that_catch_signals(sandbox: Sandbox) -> None:
    quick = replace(LIMITS, wall_s=0.5)
    outcome = await python(
        sandbox,
        "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except: 0\nsignal.pause()",
        quick,
    )
    assert (outcome.limit, outcome.exit_code, outcome.signal) == ("wall", None, None)
    assert 0.5 <= outcome.wall_s < 5


async def test_processor_time_of_all_processes_together_is_bounded(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox, "import os\nos.fork(); os.fork()\nwhile True: pass", replace(LIMITS, cpu_s=0.5, wall_s=60)
    )
    assert outcome.limit == "cpu"


async def test_children_that_outlive_the_program_steal_no_time_and_meet_no_later_run(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open("/tmp/alive", "w").write(str(time.time()))
            time.sleep(0.01)
    os._exit(0)
os.wait()
open("/tmp/left", "w").write("behind")
open("/dev/shm/left", "w").write("behind")
print("over")
""",
    )
    assert outcome.stdout == b"over\n"
    assert outcome.wall_s < 5
    after = await python(sandbox, "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), os.getpid() < 4)")
    assert after.stdout == b"[] [] True\n"


async def test_no_signal_reaches_whoever_watches(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import os, signal
for pid in (-1, 0, 1, os.getppid(), *range(2, 300)):
    if pid in (0, os.getpid()):
        continue
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("still here")
""",
    )
    assert outcome.stdout == b"still here\n"
    assert (await python(sandbox, "print('the next')")).stdout == b"the next\n"


async def test_neither_the_watchers_memory_nor_its_pipes_can_be_reached(sandbox: Sandbox) -> None:
    outcome = await python(
        sandbox,
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.ptrace(16, pid, 0, 0) for pid in (1, os.getppid())])
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        print("open", fd)
    except OSError:
        pass
""",
    )
    assert outcome.stdout == b"[-1, -1]\n"


async def test_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    """A preparation may leave links in the sandbox; they mean what they mean in the sandbox."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    links = f"os.symlink({str(victim)!r}, '/sandbox/link')\nos.symlink('/etc', '/sandbox/folder')"
    await sandbox.put({"prepare.py": f"import os\n{links}".encode()})
    assert (await sandbox.prepare(["python", "prepare.py"], LIMITS)).succeeded
    outcome = await python(sandbox, "print(open('/sandbox/link').read())")
    assert b"FileNotFoundError" in outcome.stderr
    assert victim.read_text() == "as it was"


async def test_signals_and_exit_codes_are_told_apart(sandbox: Sandbox) -> None:
    assert (await python(sandbox, "raise SystemExit(7)")).exit_code == 7
    assert (await python(sandbox, "import os; os.abort()")).signal == signal.SIGABRT
    assert (await python(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).signal == signal.SIGSEGV
    assert (await python(sandbox, "1 / 0")).exit_code == 1
    missing = await sandbox.run(["no-such-program"], LIMITS)
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr
