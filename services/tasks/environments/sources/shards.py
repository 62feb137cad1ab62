"""Which files a path means: one file, a pattern, or a folder, whose shards are told apart by split."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gspo.tasks.environments import Split
from gspo_services.shared.runtime.paths import way_to_rows
from gspo_services.tasks.environments.sources.packing import PACKED

FORMATS: Final = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
EXPECTED: Final = ".jsonl, .json, .csv, .tsv (each also as .gz or .zst), .parquet, or a folder with such files"
STATE: Final = "state.json"
SPLITS: Final = "dataset_dict.json"
_WORDS: Final = {
    "train": "train", "training": "train", "valid": "validation", "validation": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "evaluation", "evaluation": "evaluation",
}  # fmt: skip
_WORD: Final = re.compile(rf"(?<![a-z0-9])({'|'.join(_WORDS)})(?![a-z])")


class _State(msgspec.Struct):
    """state.json, as far as it is read."""

    data_files: list[dict[str, Any]] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


def format_of(path: Path) -> str | None:
    """A value of ``FORMATS``; None for another file."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    found = FORMATS.get(Path(name.removesuffix(packed)).suffix)
    return None if packed and found in ("parquet", "arrow") else found


def label_of(text: str) -> str:
    """What a source is called by its path: the name without what tells its format."""
    name = re.sub(r"[*?\[\]]+", "", Path(text).name)
    while (suffix := f".{name.rpartition('.')[2]}".lower()) in (*FORMATS, *PACKED) and "." in name:
        name = name[: -len(suffix)]
    return name.strip("-_.") or Path(text).parent.name


def files_of(path: Path, split: Split) -> list[Path]:
    """The files that ``path`` means for a split, in the order of their names. Raises: ValueError with the way out."""
    if path.is_dir():
        return _folder(path, split)
    if path.is_file():
        if format_of(path) is None:
            raise ValueError(f"{path} is none of the files that can be read: {EXPECTED}")
        return [path]
    if glob.has_magic(path.name):
        found = sorted(Path(each) for each in glob.glob(str(path)) if Path(each).is_file())
        if not found:
            raise ValueError(f"no file is called like {path.absolute()}: correct the pattern")
        if wrong := next((each for each in found if format_of(each) is None), None):
            raise ValueError(f"{wrong}, which {path.name} means too, is none of the files that can be read: {EXPECTED}")
        return _of_split(found, split, path.parent)
    text = f"there is no file {path.absolute()}: correct train_path or eval_path in environment.options"
    raise ValueError(f"{text}{way_to_rows(path)}")


def _folder(folder: Path, split: Split) -> list[Path]:
    if (folder / STATE).is_file():
        return _saved(folder)
    if (folder / SPLITS).is_file():
        return _saved(_saved_split(folder, split))
    shards = _shards(folder)
    if not shards and (folder / "data").is_dir():
        # As data sets lie in their repositories.
        folder /= "data"
        shards = _shards(folder)
    if not shards and (folders := _split_folders(folder)):
        chosen = _names_of_split(folders, split, folder, "folders")
        return [each for name in folders if name in chosen for each in _shards(folder / name)]
    if not shards:
        inside = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
        hint = f"; its folders are {', '.join(inside)[:300]}: name one" if inside else ""
        raise ValueError(f"the folder {folder} holds no file that can be read ({EXPECTED}){hint}")
    return _of_split(shards, split, folder)


def _split_folders(folder: Path) -> list[str]:
    """Its folders train, test and so on, if they have rows and one is for training; other names beside them say no split."""
    names = [
        each.name for each in sorted(folder.iterdir()) if each.is_dir() and each.name.lower() in _WORDS and _shards(each)
    ]
    return names if "train" in {_word(name) for name in names} else []


def _shards(folder: Path) -> list[Path]:
    """Files of one format. Raises: ValueError where there are several: which ones are meant is not ours to guess."""
    by_format: dict[str, list[Path]] = {}
    for each in sorted(folder.iterdir()):
        found = format_of(each)
        if found is not None and each.is_file() and not each.name.startswith("."):
            by_format.setdefault(found, []).append(each)
    # Beside rows, .json files say something about them: dataset_infos.json.
    if len(by_format) > 1:
        by_format.pop("json", None)
    if len(by_format) > 1:
        names = " and ".join(files[0].name for files in by_format.values())
        raise ValueError(
            f'{folder} holds files of several formats ({names}): name those that are meant, such as "{folder}/*.parquet"'
        )
    return next(iter(by_format.values()), [])


def _of_split(files: Sequence[Path], split: Split, folder: Path) -> list[Path]:
    """The files of a split where their names tell it; all of them where there is nothing to tell apart."""
    names = set(_names_of_split([each.name for each in files], split, folder, "files"))
    return [each for each in files if each.name in names]


def _names_of_split(names: Sequence[str], split: Split, folder: Path, what: str) -> Sequence[str]:
    """Raises: ValueError where the names leave open which are meant."""
    words = {name: _word(name) for name in names}
    known = {word for word in words.values() if word}
    if len(known) < 2:
        return names
    wanted = {"train"} if split == "train" else known - {"train"}
    example = next((name for name in names if words[name] in wanted), names[0])
    way_out = f'name those that are meant, such as {split}_path = "{folder / example}"'
    if odd := next((name for name, word in words.items() if not word), None):
        raise ValueError(
            f"{folder} holds {what} for {' and '.join(sorted(known))}, and {odd}, which says no split: {way_out}"
        )
    if split == "train" and "train" not in known:
        raise ValueError(f"{folder} holds {what} for {' and '.join(sorted(known))}, and none for training: {way_out}")
    if len(wanted) > 1:
        raise ValueError(f"{folder} holds {what} for {' and '.join(sorted(wanted))}: {way_out}")
    return [name for name in names if words[name] in wanted]


def _word(name: str) -> str | None:
    found = _WORD.search(name.lower())
    return _WORDS[found[1]] if found else None


def _saved(folder: Path) -> list[Path]:
    """The files of a dataset that ``save_to_disk`` wrote, in their order. Raises: ValueError."""
    try:
        names = [
            str(each["filename"]) for each in msgspec.json.decode((folder / STATE).read_bytes(), type=_State).data_files
        ]
    except (msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"{folder / STATE} is not what save_to_disk writes: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder / STATE} names {missing[0]}, which is not there: copy the whole folder")
    return [folder / name for name in names]


def _saved_split(folder: Path, split: Split) -> Path:
    """The folder of a split of a saved DatasetDict. Raises: ValueError."""
    try:
        splits = msgspec.json.decode((folder / SPLITS).read_bytes(), type=_Splits).splits
    except msgspec.MsgspecError as error:
        raise ValueError(f"{folder / SPLITS} is not what save_to_disk writes: {error}") from error
    chosen = _names_of_split(splits, split, folder, "splits")
    if len(chosen) != 1:
        named = " or ".join(str(folder / each) for each in splits)
        raise ValueError(f"{folder} holds several splits: name one of them, {named}")
    return folder / chosen[0]
