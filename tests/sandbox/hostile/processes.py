"""Signals, processes and sessions."""

import random

from tests.sandbox.hostile.registry import kind


@kind
def signals_to_the_first_process(rng: random.Random) -> str:
    numbers = rng.sample([2, *range(1, 65)], 12)
    way = rng.choice(
        ["os.kill(pid, number)", "libc.tgkill(pid, pid, number)", "libc.syscall(424, os.pidfd_open(pid), number, 0, 0)"]
    )
    return f"""
for number in (2, *{numbers}):
    for pid in {rng.choice(["(1,)", "(1, os.getppid())"])}:
        tried(lambda: {way})
time.sleep({rng.uniform(0, 0.2):.2f})
print("over")
"""


@kind
def signals_to_everybody(rng: random.Random) -> str:
    return f"""
if {rng.random() < 0.5}:
    os.fork()
for number in {rng.sample(range(1, 32), 6)}:
    tried(os.kill, {rng.choice([-1, 0, 1])}, number)
"""


@kind
def signals_of_the_kernel_to_the_first_process(rng: random.Random) -> str:
    """By the end of a child, by what a file says, and by a clock."""
    number = rng.choice([2, 9, 11, 15, 19])
    return f"""
import fcntl
a, b = socket.socketpair()
tried(fcntl.fcntl, a, fcntl.F_SETOWN, 1)
tried(fcntl.fcntl, a, 10, {number})
tried(fcntl.fcntl, a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
b.send(b"x")
pid = libc.syscall(56, 0x8000 | {number}, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
libc.prctl(1, {number}, 0, 0, 0)
time.sleep(0.1)
print("over")
"""


@kind
def orphans_that_signal(rng: random.Random) -> str:
    return f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep({rng.uniform(0, 0.2):.2f})
        for number in (2, {rng.randrange(1, 64)}):
            tried(os.kill, 1, number)
        {rng.choice(["while True: pass", "time.sleep(100)", "pass"])}
    os._exit(0)
time.sleep({rng.uniform(0, 0.4):.2f})
"""


@kind
def limits_of_the_first_process(rng: random.Random) -> str:
    names = ["RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_STACK", "RLIMIT_DATA", "RLIMIT_NPROC"]
    rng.shuffle(names)
    return f"""
for name in {names}:
    for pid in (1, os.getppid()):
        tried(resource.prlimit, pid, getattr(resource, name), (0, 0))
tried(os.setpriority, os.PRIO_PROCESS, 1, 19)
tried(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
tried(os.sched_setaffinity, 1, [0])
for _ in range({rng.randrange(2, 200)}):
    pid = tried(os.fork)
    if pid == 0:
        if os.fork():
            os._exit(0)
        os._exit(0)
    if pid:
        os.waitpid(pid, 0)
"""


@kind
def fork_bomb(rng: random.Random) -> str:
    return f"""
while True:
    try:
        os.fork()
    except OSError:
        {rng.choice(["pass", "time.sleep(0.01)", "os._exit(1)", "os.abort()"])}
"""


@kind
def daemons(rng: random.Random) -> str:
    return f"""
for _ in range({rng.randrange(1, 12)}):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for fd in range({rng.choice([0, 3])}, 64):
            tried(os.close, fd)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
        {rng.choice(["time.sleep(1000)", "while True: pass", "signal.pause()"])}
print("over")
"""


@kind
def zombies(rng: random.Random) -> str:
    return f"""
while True:
    pid = tried(os.fork)
    if pid == 0:
        os._exit({rng.randrange(256)})
    if pid is None:
        break
os._exit({rng.randrange(256)})
"""


@kind
def threads_without_end(rng: random.Random) -> str:
    return f"""
threading.stack_size({rng.choice([32768, 1 << 20, 1 << 26])})
try:
    while True:
        threading.Thread(target=time.sleep, args=({rng.choice([0.1, 1000])},), daemon={rng.random() < 0.5}).start()
except RuntimeError:
    print("no more")
"""


@kind
def stops_itself(rng: random.Random) -> str:
    return rng.choice(
        [
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "os.kill(0, signal.SIGSTOP)",
            "os.fork()\nos.kill(-1, signal.SIGSTOP)\nsignal.pause()",
        ]
    )


@kind
def sleeps_for_ever(rng: random.Random) -> str:
    return rng.choice(
        [
            "time.sleep(10 ** 8)",
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: signal.pause()",
            "os.read(os.pipe()[0], 1)",
            "threading.Lock().acquire()\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
            "if os.fork(): os.wait()\nelse: time.sleep(10 ** 8)",
        ]
    )


@kind
def ends_by_a_signal(rng: random.Random) -> str:
    return f"os.kill(os.getpid(), {rng.choice([*range(1, 32), 35, 64])})\ntime.sleep(0.05)"


@kind
def leaves_its_session(rng: random.Random) -> str:
    return f"""
libc.prctl(36, 1, 0, 0, 0)
tried(os.setsid)
tried(os.setpgid, 0, 0)
if os.fork() == 0:
    os.setsid()
    tried(os.open, "/dev/tty", os.O_RDWR)
    tried(os.open, "/dev/ptmx", os.O_RDWR)
    import fcntl
    tried(fcntl.ioctl, 0, 0x5412, b"x")
    time.sleep({rng.choice([0, 1000])})
libc.prctl(4, 1, 0, 0, 0)
libc.prctl({rng.randrange(1, 70)}, {rng.choice([0, 1, 2, 9])}, 0, 0, 0)
"""
