"""Directories of others: plain names, regular files, no links, no more bytes than were declared."""

import os
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.shared.runtime import foreign
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree, name_problem, require_names

PARTS = st.sampled_from(("", ".", "..", "a", "b", "...", "a b", "é", "\0", "\n", "\ud800", "n" * 255, "n" * 256))


@given(st.lists(PARTS, min_size=1, max_size=20).map("/".join))
def test_a_name_without_a_problem_is_a_file_below_the_directory(name: str) -> None:
    if name_problem(name):
        return
    assert not os.path.isabs(name)
    assert os.path.normpath(name) == name
    assert ".." not in Path(name).parts
    assert len(os.fsencode(name)) < 4096
    assert str(Path(name)) == name


@settings(max_examples=50)
@given(st.lists(st.sampled_from(("a", "a/b", "link", "link/b", "pipe", "loop", "gone", "out")), min_size=1), st.data())
def test_only_regular_files_behind_no_link_are_opened(names: list[str], data: st.DataObject) -> None:
    with TemporaryDirectory() as made:
        root = Path(made) / "tree"
        (root / "folder").mkdir(parents=True)
        (root / "folder" / "b").write_bytes(b"xy")
        (root / "file").write_bytes(b"abc")
        (root / "link").symlink_to("folder")
        (root / "out").symlink_to("/etc/hostname")
        (root / "loop").symlink_to("loop")
        os.mkfifo(root / "pipe")
        tree = ForeignTree(root)
        assert (tree.read("file"), tree.num_bytes("folder/b")) == (b"abc", 2)
        for name in names:
            with pytest.raises((ForeignError, FileNotFoundError, NotADirectoryError)):
                tree.read(name)


def test_a_directory_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"x")
    (tmp_path / "named").symlink_to("real")
    assert ForeignTree(tmp_path / "named").sha256("a") == sha256(b"x").hexdigest()


def test_no_more_is_copied_than_was_declared_and_no_less(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    tree = ForeignTree(tmp_path)
    assert tree.copy("a", 3, tmp_path / "copy") == sha256(b"abc").hexdigest()
    assert (tmp_path / "copy").read_bytes() == b"abc"
    with pytest.raises(ForeignError, match=r"a ended after 6 bytes, 7 were written"):
        tree.copy("a", 7, tmp_path / "longer")
    with pytest.raises(FileExistsError):
        tree.copy("a", 3, tmp_path / "copy")
    with pytest.raises(ForeignError, match=r"a has 6 bytes, at most 5 are read"):
        tree.read("a", 5)


def test_numbers_of_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "MOST_FILES", 2)
    require_names(["a", "b"])
    with pytest.raises(ForeignError, match="3 files, at most 2 are taken"):
        require_names(["a", "b", "c"])
