"""The corpus: what an archive may hold, how a case gets in, and what the committed archives contain."""

import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.archive import MAX_INPUT_BYTES, MAX_UNPACKED_BYTES, ArchiveError, pack, unpack
from tests.fuzz.corpus import BROKEN, CORPUS, CorpusError, add, archive_of, cases_of, keep
from tests.fuzz.targets.registry import TARGETS

CASES = {"b": b"two", "a": b"", "broken-deep-state": b"\0" * 3000}
WITHOUT_CASES = {"learner_state"}
MAX_CORPUS_BYTES = 500 * 1024


def tar_of(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """An archive that ``pack`` would not write."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(out.getvalue())


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, mtime: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname, made.mtime = size, kind, "/etc/passwd" if kind != tarfile.REGTYPE else "", mtime
    return made


def with_damaged_header() -> bytes:
    """An archive with one wrong bit in its second header: tarfile stops there without an error."""
    raw = bytearray(lzma.decompress(pack({"a": b"x", "b": b"y"})))
    raw[1024] ^= 1
    return lzma.compress(raw)


def test_the_same_cases_give_the_same_bytes_in_any_order() -> None:
    assert pack(CASES) == pack(dict(reversed(CASES.items())))
    assert unpack(pack(CASES)) == CASES
    assert list(unpack(pack(CASES))) == ["a", "b", "broken-deep-state"]
    assert unpack(pack({})) == {}


@pytest.mark.parametrize(
    ("archive", "text"),
    [
        (lambda: tar_of(member("../escaped")), "'../escaped' has no plain file name"),
        (lambda: tar_of(member("/tmp/escaped")), "'/tmp/escaped' has no plain file name"),
        (lambda: tar_of(member("folder/case")), "'folder/case' has no plain file name"),
        (lambda: tar_of(member("..")), "'..' has no plain file name"),
        (lambda: tar_of(member("case", kind=tarfile.SYMTYPE)), "'case' is a link or a special file"),
        (lambda: tar_of(member("case", kind=tarfile.LNKTYPE)), "'case' is a link or a special file"),
        (lambda: tar_of(member("case", kind=tarfile.DIRTYPE)), "'case' is a link or a special file"),
        (lambda: tar_of(member("case", kind=tarfile.FIFOTYPE)), "'case' is a link or a special file"),
        (lambda: tar_of(member("case"), member("case")), "two members are called 'case'"),
        (lambda: tar_of(member("b"), member("a")), "another program packed it"),
        (lambda: tar_of(member("case", mtime=1)), "another program packed it"),
        (
            lambda: tar_of(member("case", MAX_INPUT_BYTES + 1), content=bytes(MAX_INPUT_BYTES + 1)),
            "'case' has 65537 bytes, 65536 allowed",
        ),
        (lambda: lzma.compress(bytes(MAX_UNPACKED_BYTES + 1)), "it unpacks to more than 4194304 bytes"),
        (lambda: lzma.compress(b"no tar"), "the tar file inside is damaged"),
        (with_damaged_header, "its members are damaged"),
        (lambda: b"this file is not compressed", "its compression is damaged"),
        (lambda: pack(CASES)[:-1], "it ends too early"),
        (lambda: b"", "it ends too early"),
        (lambda: pack(CASES) + b"more", "4 bytes follow its end"),
    ],
)
def test_an_archive_that_pack_does_not_write_is_refused(archive: Callable[[], bytes], text: str) -> None:
    with pytest.raises(ArchiveError) as refusal:
        unpack(archive())
    assert text in str(refusal.value)


def test_no_bit_of_an_archive_can_change_unseen() -> None:
    archive = pack({"a": b"content"})
    for at in range(len(archive)):
        changed = bytearray(archive)
        changed[at] ^= 1
        with pytest.raises(ArchiveError):
            unpack(bytes(changed))


def test_a_name_or_size_that_cannot_be_read_back_is_not_packed() -> None:
    for name in ("../a", "a/b", ".hidden", "", "a\n", "x" * 81):
        with pytest.raises(ArchiveError, match="no plain file name"):
            pack({name: b""})
    with pytest.raises(ArchiveError, match="65537 bytes, 65536 allowed"):
        pack({"a": bytes(MAX_INPUT_BYTES + 1)})
    with pytest.raises(ArchiveError, match="4194304 allowed"):
        pack({f"case-{number}": bytes(MAX_INPUT_BYTES) for number in range(65)})


def test_a_damaged_archive_names_its_path_and_the_way_out(tmp_path: Path) -> None:
    keep("message", [b"x"], corpus=tmp_path)
    path = archive_of("message", tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorpusError) as refusal:
        cases_of("message", tmp_path)
    assert str(path) in str(refusal.value)
    assert f"git restore {path}" in str(refusal.value)
    with pytest.raises(CorpusError, match="ends too early"):
        keep("message", [b"y"], corpus=tmp_path)


def test_inputs_that_a_run_keeps_are_named_by_their_content(tmp_path: Path) -> None:
    assert cases_of("message", tmp_path) == {}
    assert keep("message", [b"x", b"y"], corpus=tmp_path) == ["4adf4367f96e584f", "0fa38cc58395a65f"]
    assert keep("message", [b"z"], broken=True, corpus=tmp_path) == ["broken-8441b0a728fd4130"]
    assert list(cases_of("message", tmp_path).values()) == [b"y", b"x", b"z"]
    assert archive_of("message", tmp_path) == tmp_path / "wire" / "message.tar.xz"


def test_a_file_called_broken_keeps_its_name(tmp_path: Path) -> None:
    named, other = tmp_path / "broken-deep-state", tmp_path / "crash-17"
    named.write_bytes(b"x")
    other.write_bytes(b"y")
    corpus = tmp_path / "corpus"
    assert add("stored_chunk", named, corpus) == "broken-deep-state"
    assert add("stored_chunk", other, corpus) == keep("stored_chunk", [b"y"], broken=True, corpus=corpus)[0]
    assert sorted(cases_of("stored_chunk", corpus).values()) == [b"x", b"y"]
    before = archive_of("stored_chunk", corpus).stat().st_mtime_ns
    assert add("stored_chunk", named, corpus) == "broken-deep-state"
    assert archive_of("stored_chunk", corpus).stat().st_mtime_ns == before
    named.write_bytes(b"z")
    with pytest.raises(CorpusError, match="another case called broken-deep-state"):
        add("stored_chunk", named, corpus)


def test_a_case_that_does_not_fit_leaves_the_archive_as_it_was(tmp_path: Path) -> None:
    keep("message", [b"x"], corpus=tmp_path)
    before = archive_of("message", tmp_path).read_bytes()
    large = tmp_path / "broken-large"
    large.write_bytes(bytes(MAX_INPUT_BYTES + 1))
    with pytest.raises(CorpusError, match="65537 bytes, 65536 allowed"):
        add("message", large, tmp_path)
    assert archive_of("message", tmp_path).read_bytes() == before


@pytest.mark.parametrize(
    ("target", "file", "text"),
    [("unheard_of", "x", "no target is called 'unheard_of'"), ("message", "absent", "absent cannot be added")],
)
def test_the_command_refuses_what_it_cannot_add(
    target: str, file: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--add", target, file])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_corpus_has_the_archives_of_its_targets_and_nothing_else() -> None:
    found = {path for path in CORPUS.rglob("*") if path.is_file()}
    assert found <= {archive_of(name) for name in TARGETS}
    assert found >= {archive_of(name) for name in set(TARGETS) - WITHOUT_CASES}


def test_the_corpus_is_small_and_holds_what_once_broke() -> None:
    cases = {(target, name): data for target in TARGETS for name, data in cases_of(target).items()}
    assert len(cases) >= 968
    assert sum(map(len, cases.values())) < MAX_CORPUS_BYTES
    assert sum(name.startswith(BROKEN) for _, name in cases) >= 20
    assert ("stored_chunk", "broken-deep-state") in cases


def test_every_input_that_a_run_may_find_fits_into_an_archive() -> None:
    assert max(target.max_bytes for target in TARGETS.values()) <= MAX_INPUT_BYTES
