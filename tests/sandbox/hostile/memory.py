"""Memory of every kind, most of it no process maps."""

import random

from tests.sandbox.hostile.registry import kind


@kind
def memory_of_many(rng: random.Random) -> str:
    return f"""
for _ in range({rng.randrange(1, 20)}):
    if tried(os.fork) == 0:
        kept = tried(bytearray, {rng.randrange(10, 300)} << 20)
        if kept:
            kept[::4096] = b"x" * len(kept[::4096])
        time.sleep(1000)
time.sleep({rng.choice([0.3, 1000])})
"""


@kind
def memory_of_nobody(rng: random.Random) -> str:
    """Of files that have no name: as many as the kernel gives."""
    makers = [
        "os.memfd_create('x')",
        "libc.syscall(319, b'x', 4)",
        "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
        "os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)",
    ]
    return f"""
files = []
for make in ({", ".join("lambda: " + maker for maker in rng.sample(makers, 4))}):
    while True:
        fd = tried(make)
        if fd is None or fd < 0 or tried(os.write, fd, bytes({rng.randrange(8, 16)} << 20)) is None:
            break
        files.append(fd)
print(len(files))
time.sleep({rng.choice([0, 0.3])})
"""


@kind
def memory_of_tmpfs(rng: random.Random) -> str:
    return f"""
for folder in ("/tmp", "/dev/shm", "/sandbox", "/dev", "/proc"):
    for number in range({rng.randrange(5, 50)}):
        try:
            with open(f"{{folder}}/{{number}}", "wb") as file:
                file.write(bytes({rng.randrange(1, 8)} << 20))
        except OSError:
            break
"""


@kind
def memory_that_is_shared(rng: random.Random) -> str:
    """Mapped, filled, and given back by the process, while the mapping stays."""
    names = rng.sample(["/dev/zero", "/dev/full", "/dev/null"], 3)
    return f"""
import mmap
kept = []
for source in (-1, *(os.open(name, os.O_RDWR) for name in {names})):
    for _ in range({rng.randrange(20, 40)}):
        area = tried(lambda: mmap.mmap(source, 4 << 20))
        if area is None:
            break
        area[::4096] = b"x" * (1 << 10)
        area.madvise(mmap.MADV_DONTNEED)
        kept.append(area)
        if len(kept) % 20 == 0:
            os.fork()
if os.fork():
    os._exit(0)
time.sleep(0.2)
"""


@kind
def memory_of_system_v(rng: random.Random) -> str:
    return f"""
libc.shmat.restype = ctypes.c_void_p
for number in range({rng.randrange(5, 60)}):
    found = libc.shmget({rng.choice([0, "4711 + number"])}, 32 << 20, 0o1600)
    if found < 0:
        break
    place = libc.shmat(found, None, 0)
    if place not in (None, 2 ** 64 - 1):
        ctypes.memset(place, 1, 32 << 20)
        libc.shmdt(ctypes.c_void_p(place))
for number in range(1000):
    queue = libc.msgget(0, 0o1600)
    while queue >= 0 and libc.msgsnd(queue, struct.pack("l", 1) + bytes(8192), 8192, 0o4000) == 0:
        pass
    if libc.semget(0, 32000, 0o1600) < 0 and queue < 0:
        break
"""


@kind
def memory_of_pipes(rng: random.Random) -> str:
    return f"""
import fcntl
for _ in range({rng.randrange(0, 6)}):
    tried(os.fork)
pipes = []
while len(pipes) < 2000:
    ends = tried(os.pipe)
    if ends is None:
        break
    tried(fcntl.fcntl, ends[1], 1031, {rng.choice([4096, 1 << 20])})
    os.set_blocking(ends[1], False)
    while tried(os.write, ends[1], bytes(65536)):
        pass
    pipes.append(ends)
time.sleep({rng.choice([0, 0.3])})
"""


@kind
def memory_of_sockets(rng: random.Random) -> str:
    family = rng.choice(["socket.AF_UNIX", "socket.AF_INET"])
    return f"""
for _ in range({rng.randrange(0, 6)}):
    tried(os.fork)
kept = []
def pair():
    if {family} == socket.AF_UNIX:
        return socket.socketpair(socket.AF_UNIX, {rng.choice(["socket.SOCK_STREAM", "socket.SOCK_DGRAM"])})
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]
while len(kept) < 2000:
    ends = tried(pair)
    if ends is None:
        break
    for end in ends:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        while tried(end.send, bytes(65536)):
            pass
    kept.append(ends)
time.sleep({rng.choice([0, 0.5])})
"""


@kind
def memory_of_page_tables(rng: random.Random) -> str:
    return f"""
import mmap
for _ in range({rng.randrange(0, 5)}):
    tried(os.fork)
kept = []
while True:
    area = tried(lambda: mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if area is None:
        break
    for place in range(0, 64 << 20, {rng.choice([1 << 21, 1 << 16])}):
        area[place]
    kept.append(area)
print(len(kept))
"""
