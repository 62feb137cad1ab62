"""Files, outputs and odd ends."""

import random

from tests.sandbox.hostile.registry import kind


@kind
def descriptors(rng: random.Random) -> str:
    make = rng.choice(["os.open('/dev/null', 0)", "os.pipe()", "os.eventfd(0)", "__import__('select').epoll()"])
    return f"""
kept = []
try:
    while True:
        kept.append({make})
except OSError as error:
    print(error.errno)
tried(resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
tried(os.dup2, 0, {rng.randrange(300, 100000)})
"""


@kind
def files_without_end(rng: random.Random) -> str:
    make = rng.choice(
        [
            "os.close(os.open(name, os.O_CREAT))", "os.mkdir(name)", "os.symlink('x' * 4000, name)", "os.mkfifo(name)",
            "os.link('/tmp/one', name)", "socket.socket(socket.AF_UNIX).bind(name)",
        ]
    )  # fmt: skip
    return f"""
open("/tmp/one", "w").close()
try:
    for number in range(10 ** 6):
        name = f"/tmp/{{number}}"
        {make}
except OSError as error:
    print(error.errno)
"""


@kind
def deep_folders(rng: random.Random) -> str:
    return f"""
name = "{"d" * rng.choice([1, 200])}"
for _ in range({rng.choice([1000, 20000])}):
    if tried(os.mkdir, name) is None and not os.path.isdir(name):
        break
    os.chdir(name)
"""


@kind
def odd_files(rng: random.Random) -> str:
    return f"""
tried(os.mkfifo, "/tmp/fifo")
tried(os.symlink, "/sandbox", "/tmp/out")
tried(os.symlink, "/tmp/loop", "/tmp/loop")
tried(os.link, "/usr/bin/env", "/tmp/env")
tried(os.mknod, "/tmp/null", 0o20666, os.makedev(1, {rng.randrange(1, 12)}))
for name in ("/tmp/out/x", "/tmp/loop", "/tmp/env", "/sandbox/script.py", "/init/x", "/etc/x", "/dev/x", "/dev/pts/0"):
    tried(lambda: open(name, "w").write("x"))
tried(os.chmod, "/sandbox", 0)
tried(os.rename, "/sandbox", "/tmp/s")
{rng.choice(["open('/tmp/fifo').read()", "os.chmod('/tmp', 0)", "os.umask(0o777)", "pass"])}
"""


@kind
def output_without_end(rng: random.Random) -> str:
    return f"""
while True:
    os.write({rng.choice([1, 2])}, bytes([{rng.randrange(256)}]) * {rng.choice([1, 4096, 1 << 20])})
"""


@kind
def output_with_escapes(rng: random.Random) -> str:
    shown = rng.choice(
        ["'\\x1b[2J\\x1b]0;title\\x07'", "'\\0\\0\\0\\x02{}'", "'{\"status\": 0}\\n'", "'\\ud800'", "'\\x9b31m\\u202e'"]
    )
    stream, times = rng.choice(["stdout", "stderr"]), rng.randrange(1, 5000)
    return f"sys.{stream}.buffer.write(({shown} * {times}).encode(errors='surrogatepass'))"


@kind
def closes_its_streams(rng: random.Random) -> str:
    return f"""
for fd in {rng.sample([0, 1, 2], rng.randrange(1, 4))}:
    {rng.choice(["os.close(fd)", "os.dup2(os.open('/dev/null', os.O_RDWR), fd)", "os.set_blocking(fd, False)"])}
{rng.choice(["raise SystemExit(3)", "os.abort()", "print('x')", "os._exit(300)"])}
"""


@kind
def streams_that_travel(rng: random.Random) -> str:
    """Its output in a circle of sockets that nobody closes."""
    return f"""
for _ in range({rng.randrange(1, 40)}):
    a, b = socket.socketpair()
    socket.send_fds(a, [b"x"], [a.fileno(), b.fileno(), {rng.choice(["1, 2", "0, 1, 2", "1"])}])
    a.close()
    b.close()
os._exit({rng.randrange(256)})
"""


@kind
def writes_to_every_file(rng: random.Random) -> str:
    return f"""
for fd in range({rng.choice([64, 2000])}):
    tried(os.write, fd, b'{{"status": 0, "failed": "forged", "cpu_s": 0}}\\n')
    tried(os.lseek, fd, 0, 0)
    tried(os.ftruncate, fd, 0)
os._exit({rng.randrange(1, 256)})
"""


@kind
def ends_oddly(rng: random.Random) -> str:
    return rng.choice(
        [
            "raise SystemExit(10 ** 40)", "raise SystemExit(-1)", "raise SystemExit('no')", "sys.stdout = None\nprint('x')",
            "os._exit = print\nos.execvpe = print\nsys.exit(3)", "import atexit\natexit.register(os.abort)",
            "def f(): f()\nsys.setrecursionlimit(10 ** 6)\nf()",
            "class E(BaseException):\n  def __str__(self): raise self\nraise E",
            "import gc\nfor o in gc.get_objects():\n  if isinstance(o, dict) and 'limits' in o: o.clear()\nraise OSError",
            "ctypes.string_at(0)", "threading.Thread(target=lambda: time.sleep(1000)).start()",
            "sys._getframe(3).f_globals.clear()", "class I(int):\n  def __and__(s, o): return 'x'\nraise SystemExit(I(3))",
        ]
    )  # fmt: skip
