"""What looks for others, for the host, and for calls that nobody needs."""

import random

from tests.sandbox.hostile.registry import CANARY, SEEN, kind


@kind
def looks_at_processes(rng: random.Random) -> str:
    order = rng.sample(range(1, 400), 30)
    return f"""
tried(libc.mount, b"proc", b"/proc", b"proc", 0, None)
for pid in (1, os.getppid(), *{order}):
    for name in ("environ", "mem", "maps", "fd/0", "root/etc/shadow", "cwd", "oom_score_adj", "task"):
        try:
            os.stat(f"/proc/{{pid}}/{{name}}")
            print("{SEEN} /proc", pid, name)
        except OSError:
            pass
    if pid != os.getpid():
        if libc.ptrace(16, pid, 0, 0) == 0:
            print("{SEEN} traced", pid)
        buffer = ctypes.create_string_buffer(64)
        part = struct.pack("QQ", ctypes.addressof(buffer), 64)
        if libc.syscall(310, pid, part, 1, part, 1, 0) > 0:
            print("{SEEN} memory of", pid)
        fd = tried(os.pidfd_open, pid)
        if fd is not None and libc.syscall(438, fd, 0, 0) >= 0:
            print("{SEEN} a file of", pid)
"""


@kind
def writes_about_itself(rng: random.Random) -> str:
    names = ["oom_score_adj", "uid_map", "gid_map", "setgroups", "mem", "comm", "coredump_filter", "timerslack_ns"]
    return f"""
for name in {rng.sample(names, 5)}:
    for place in ("self", "1", str(os.getpid()), "sys/kernel", "sysrq-trigger"):
        if tried(lambda: open(f"/proc/{{place}}/{{name}}", "w").write("-1000")) is not None:
            print("{SEEN} written", place, name)
"""


@kind
def looks_for_others(rng: random.Random) -> str:
    return f"""
for folder in ("/tmp", "/dev/shm", "/sandbox", "/var/tmp", "/run", "/home", "/sys/fs/cgroup", "/proc"):
    for name in tried(os.listdir, folder) or []:
        if "{CANARY}" in name or folder in ("/run", "/home", "/sys/fs/cgroup", "/proc"):
            print("{SEEN}", folder, name)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    if tried(lambda: socket.socket(socket.AF_UNIX, kind).connect("\\0{CANARY}") or True):
        print("{SEEN} socket")
if libc.shmget(4712, 100, 0) >= 0 or libc.syscall(249, b"user", b"{CANARY}", None, 0) >= 0:
    print("{SEEN} memory or key")
for address in (("127.0.0.1", {rng.randrange(1, 65536)}), ("169.254.169.254", 80), ("8.8.8.8", 53)):
    end = socket.socket()
    end.settimeout(0.2)
    if tried(lambda: end.connect(address) or True):
        print("{SEEN}", address)
"""


@kind
def sockets_of_every_family(rng: random.Random) -> str:
    return f"""
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fd = libc.syscall(41, family, kind, {rng.choice([0, 0, 6, 17, 768])})
        if fd >= 0:
            if family != 1:
                print("{SEEN} family", family)
            os.close(fd)
    if libc.syscall(53, family, 1, 0, ctypes.create_string_buffer(8)) == 0 and family != 1:
        print("{SEEN} pair", family)
"""


@kind
def calls_that_nobody_needs(rng: random.Random) -> str:
    """With arguments that a kernel without a filter would take, and with any."""
    return f"""
if os.uname().machine != "x86_64":
    sys.exit()
room = ctypes.create_string_buffer(200)
for name, number, *arguments in (
    ("io_uring_setup", 425, 8, room), ("keyctl", 250, 0, -3, 1), ("add_key", 248, b"user", b"{CANARY}", b"y", 1, -3),
    ("unshare", 272, 0x10000000), ("unshare", 272, 0x20000), ("userfaultfd", 323, 1), ("bpf", 321, 0, room, 72),
    ("perf_event_open", 298, room, 0, -1, -1, 0), ("memfd_create", 319, b"x", 0), ("memfd_secret", 447, 0),
    ("clone3", 435, room, 88), ("setns", 308, 0, 0), ("fsopen", 430, b"tmpfs", 0), ("shmget", 29, 0, 4096, 0o1600),
    ("mq_open", 240, b"x", 0o102, 0o600, None), ("inotify_init1", 294, 0), ("io_setup", 206, 8, room),
    ("vmsplice", 278, 1, None, 0, 0), ("process_madvise", 440, 0, None, 0, 4, 0), ("pivot_root", 155, b"/tmp", b"/tmp"),
    ("open_by_handle_at", 304, -100, room, 0), ("swapon", 167, b"/tmp/x", 0), ("beyond", {rng.randrange(470, 600)}),
):
    if libc.syscall(number, *arguments) >= 0:
        print("{SEEN} call", name)
child = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
if child > 0:
    print("{SEEN} namespace")
for _ in range(300):
    number = {rng.choice(["RNG.randrange(600)", "RNG.randrange(0x40000000, 0x40000220)", "RNG.randrange(400, 470)"])}
    if number in (0, 3, 15, 23, 34, 35, 56, 57, 58, 59, 60, 61, 130, 202, 219, 230, 231, 232, 247, 270, 271, 281, 322, 441):
        continue
    libc.syscall(number, *[RNG.choice((0, 1, -1, 2 ** 31, 2 ** 62)) for _ in range(6)])
""".replace("RNG", "__import__('random')")


@kind
def calls_of_another_architecture(rng: random.Random) -> str:
    """32-bit calls from a 64-bit program: ``int 0x80`` in memory that is made for it."""
    number = rng.choice([1, 20, 26, 310, 356, 359, 425])
    return f"""
import mmap
code = bytes([0x53, 0xB8]) + struct.pack("<I", {number}) + bytes([0x31, 0xDB, 0x31, 0xC9, 0xCD, 0x80, 0x5B, 0xC3])
area = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
area.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
if os.uname().machine == "x86_64":
    print("{SEEN} 32-bit call", call())
"""


@kind
def starts_other_programs(rng: random.Random) -> str:
    command = rng.choice(
        [
            "['/bin/sh', '-c', ':(){ :|:& };:; wait']", "['/bin/sh', '-c', 'kill -INT 1; kill -9 -1']",
            "['/bin/sh', '-c', 'ulimit -a; nice -n -5 true; ulimit -c unlimited; kill -SEGV $$']", "['/no/such/program']",
            "['/bin/sh', '-c', 'yes | head -c 100000000']", "['/bin/sh', '-c', 'trap \"\" 2 15; sleep 1000']",
            "['/sandbox/script.py']", "['/usr/bin/setpriv', '--reuid=0', 'id']", "['/bin/su', '-c', 'id']",
        ]
    )  # fmt: skip
    return rng.choice([f"os.execv({command}[0], {command})", f"import subprocess\nsubprocess.run({command}, timeout=5)"])
