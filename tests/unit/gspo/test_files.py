"""A directory that is replaced is there, old or new, whenever its writer is killed."""

import shutil
from pathlib import Path

import pytest

from gspo.files import make_partial_directory, publish_directory, remove_leftovers


def test_a_writer_killed_while_it_removes_the_former_directory_has_published_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "checkpoint"
    for content in ("old", "new"):
        partial = make_partial_directory(destination)
        (partial / "file").write_text(content)
        if content == "new":

            def killed(path: Path) -> None:
                raise KeyboardInterrupt(str(path))

            monkeypatch.setattr(shutil, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt, match="discarded"):
                publish_directory(partial, destination)
        else:
            publish_directory(partial, destination)
    monkeypatch.undo()
    assert (destination / "file").read_text() == "new"
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [destination]


def test_what_came_to_a_directory_meanwhile_is_not_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    destination = tmp_path / "run"
    partial = make_partial_directory(destination)
    (partial / "file").write_text("new")
    destination.mkdir()
    (destination / "other").write_text("somebody's")
    with pytest.raises(OSError, match="not empty"):
        publish_directory(partial, destination, replace=False)
    (destination / "other").unlink()
    publish_directory(partial, destination, replace=False)
    assert [path.name for path in destination.iterdir()] == ["file"]
