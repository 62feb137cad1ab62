"""The process that each run is a copy of: it is in the cgroup of the runs, and has never held what one of them was given."""

import errno
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from .frames import read_exactly
from .memory import Memory
from .namespaces import clone, enter, fork
from .program import say, watch_program

READY, ENDS_INSIDE, WAIT_S = b"ready", 4, 0.001


class Spawner:
    """Starts runs and waits for their ends.

    To enter a cgroup takes a process many milliseconds, because the kernel waits for all processors. So one does it for all.
    """

    def __init__(self, memory: Memory, filter_steps: bytes) -> None:
        """Raises: OSError where the cgroup cannot be entered."""
        self.memory, self.filter_steps, self.pid = memory, filter_steps, 0
        self.begin()

    def begin(self) -> None:
        """Start the process. Raises: OSError."""
        self.socket, inside = socket.socketpair()
        self.pid = fork()
        if self.pid == 0:
            self.serve(inside)
        inside.close()
        said = self.socket.recv(1000)
        if said != READY:
            raise OSError(f"a run cannot enter its cgroup: {said.decode(errors='replace')}")

    def start(self, request: dict[str, Any]) -> tuple[int, Sequence[int]]:
        """Start a program; gives the first process of its namespaces, and our ends of its streams and of its report.

        Raises: OSError.
        """
        inside_in, to_in = os.pipe()
        from_out, inside_out = os.pipe()
        from_err, inside_err = os.pipe()
        from_report, report = os.pipe()
        ours, inside = (to_in, from_out, from_err, from_report), (inside_in, inside_out, inside_err, report)
        try:
            first = self.ask(request, inside)
            if first < 0:
                # The kernel has ended it when memory ended: it is in the cgroup of a run that is over.
                self.socket.close()
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.begin()
                first = self.ask(request, inside)
            if first <= 0:
                raise OSError(errno.ECHILD, "no process can be started for a run")
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in inside:
                os.close(fd)
        return first, ours

    def end(self, first: int) -> None:
        """End a run, and wait until everything in its namespaces has ended."""
        os.kill(first, signal.SIGKILL)
        try:
            self.socket.sendall(struct.pack("=I", 0))
            if self.socket.recv(1):
                return
        except ConnectionError:
            pass
        # The spawner has ended before, and somebody else waits for its children.
        while True:
            try:
                os.kill(first, 0)
            except ProcessLookupError:
                return
            time.sleep(WAIT_S)

    def ask(self, request: dict[str, Any], inside: Sequence[int]) -> int:
        """The first process of a run; -1 where the spawner has ended. Raises: OSError where it cannot start any."""
        text = json.dumps(request).encode()
        try:
            socket.send_fds(self.socket, [struct.pack("=I", len(text))], inside)
            self.socket.sendall(text)
            answer = self.socket.recv(8)
        except ConnectionError:
            return -1
        if not answer:
            return -1
        first, error = struct.unpack("=ii", answer)
        if error:
            raise OSError(error, "clone3: " + os.strerror(error))
        return int(first)

    def serve(self, inside: socket.socket) -> NoReturn:
        """The process itself."""
        try:
            self.socket.close()
            nothing = os.open("/dev/null", os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            os.close(nothing)
            self.memory.join()
        except BaseException as error:  # noqa: BLE001
            inside.sendall(str(error).encode())
            os._exit(1)
        inside.sendall(READY)
        first = 0
        while True:
            length, files, _, _ = socket.recv_fds(inside, 4, ENDS_INSIDE)
            if not length:
                os._exit(0)
            (num_bytes,) = struct.unpack("=I", length)
            if num_bytes == 0:
                os.waitpid(first, 0)
                inside.sendall(READY[:1])
                continue
            request = json.loads(read_exactly(inside.fileno(), num_bytes))
            first, refusal = self.first(request, files)
            inside.sendall(struct.pack("=ii", first, refusal))
            for fd in files:
                os.close(fd)

    def first(self, request: dict[str, Any], files: Sequence[int]) -> tuple[int, int]:
        """Start the first process; gives it, or the error that the kernel has answered."""
        streams, report, uid, gid = files[:3], files[3], os.getuid(), os.getgid()
        try:
            first = clone()
        except OSError as error:
            return 0, error.errno or errno.EIO
        if first == 0:
            try:
                enter(uid, gid, request["limits"], request["prepares"])
                watch_program(request, streams, report, self.filter_steps)
            except BaseException as error:  # noqa: BLE001
                say(report, {"failed": str(error)})
            os._exit(1)
        return first, 0
