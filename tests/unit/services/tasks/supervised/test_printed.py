"""What a supervised process prints is read however much it is, by lines, and a part of it is kept."""

from gspo_services.tasks.supervised.process import _Printed


def test_what_a_program_prints_is_written_by_whole_lines_however_the_pipe_is_read() -> None:
    written: list[str] = []
    printed = _Printed(written.append)
    for piece in (b"the pro", b"gram prints", b"\n", b"\xc3", b"\xa4\nlast ", b"words"):
        printed.data_received(piece)
    assert written == ["the program prints", "ä"]
    printed.eof_received()
    printed.connection_lost(None)
    assert written == ["the program prints", "ä", "last words"]


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    written: list[str] = []
    printed = _Printed(written.append)
    for _ in range(40):
        printed.data_received(b"x" * 30_000)
    assert len(written) > 5
    assert max(map(len, written)) < 200_000
    assert written[-1].startswith("(more than 1048576 bytes")
