"""Agents that leave processes behind, each in its own way. Each writes the numbers of its processes to the task's file."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gspo.tasks.agents import Episode

BOMB = 6
"""Generations: each doubles the processes."""


def act(episode: Episode) -> Any:
    """In a thread of its own: the worker's loop goes on."""
    doing: Callable[[Episode], Any] = globals()[str(episode.task["do"])]
    return doing(episode)


def _note(episode: Episode) -> None:
    """Say who this process is, and hold the task's pipe open: so does each process that it forks."""
    os.open(str(episode.task["held"]), os.O_WRONLY)
    with open(str(episode.task["notes"]), "a") as notes:
        notes.write(f"{os.getpid()}\n")


def _wait(episode: Episode) -> None:
    """Be there for ever, in a process of its own."""
    _note(episode)
    while True:
        time.sleep(3600)


def _seen(episode: Episode, number: int = 1) -> None:
    """Wait until so many have written that they are there."""
    while True:
        with open(str(episode.task["notes"])) as notes:
            if len(notes.readlines()) >= number:
                return
        time.sleep(0.01)


def twice_forked(episode: Episode) -> float:
    """A daemon as the book has it: another session, no parent, no descriptor."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 1024)
            os.chdir("/")
            _wait(episode)
        os._exit(0)
    _seen(episode)
    return 1.0


def forked_past_python(episode: Episode) -> float:
    """A child that no hook of Python knows of keeps the connection; then the worker ends."""
    # PyDLL keeps the interpreter's lock: else another thread may have it, and the child would wait for ever.
    if ctypes.PyDLL(None).fork() == 0:
        os.setsid()
        _wait(episode)
    _seen(episode)
    os._exit(0)


def all_closed(episode: Episode) -> float:
    """Without a descriptor the worker goes on."""
    _note(episode)
    os.closerange(0, 1024)
    while True:
        time.sleep(3600)


def stopped(episode: Episode) -> float:
    _note(episode)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def stopped_child(episode: Episode) -> float:
    """A child that ignores what it can, and stops itself; then the worker is killed."""
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        _note(episode)
        os.kill(os.getpid(), signal.SIGSTOP)
        _wait(episode)
    _seen(episode)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def bomb(episode: Episode) -> float:
    """Each process makes another one in every generation, in a group of its own, and stays."""
    worker = os.getpid()
    for _ in range(BOMB):
        if os.fork() == 0:
            os.setpgid(0, 0)
            _note(episode)
    if os.getpid() != worker:
        _wait(episode)
    _seen(episode, 2**BOMB - 1)
    return 1.0


def with_a_held_lock(episode: Episode) -> float:
    """A child waits for ever for the lock of the worker's standard output, which a thread held when it was forked."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with sys.stdout._lock:  # type: ignore[attr-defined]
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if os.fork() == 0:
        _note(episode)
        print("a word that nobody hears")
        os._exit(0)
    go.set()
    thread.join()
    _seen(episode)
    return 1.0


def answers(episode: Episode) -> float:
    return 2.0
