"""What init reads of a run's streams."""

import os

from gspo_services.tasks.sandbox.init.memory import Memory
from gspo_services.tasks.sandbox.init.watch import Watch


def test_a_stream_whose_writer_stays_open_is_read_to_what_it_has() -> None:
    """A writer that travels in a circle of sockets is open for as long as the kernel likes."""
    pipes = [os.pipe() for _ in range(4)]
    (_, to_in), (from_out, out), (from_err, err), (from_report, report) = pipes
    request = {"limits": {"output_bytes": 1 << 20}, "python": False, "prepares": False}
    watch = Watch(request, b"", Memory([]), (), (to_in, from_out, from_err, from_report))
    os.write(out, b"said")
    os.write(report, b'{"status": 0}\n')
    watch.rest(from_report)
    assert watch.lines() == {"status": 0}
    assert watch.close() == [b"said", b""]
    for fd in (pipes[0][0], out, err, report):
        os.close(fd)
