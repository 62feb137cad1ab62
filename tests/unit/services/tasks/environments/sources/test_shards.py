"""Which files a path means: patterns, folders, and shards of several splits in one folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import Split
from gspo_services.tasks.environments import create_task_set


def filled(folder: Path, *names: str) -> Path:
    """Each file has its name as its row."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("name\n" + name + "\n" if ".csv" in name else json.dumps({"name": name}) + "\n")
    return folder


def names(folder: Path | str, split: Split, **more: Any) -> list[Any]:
    options = {"train_path": str(folder), "eval_path": str(folder)}
    source = create_task_set("rows", options | more).tasks(split)
    return [source.task(index)["name"] for index in range(source.num_tasks or 0)]


@pytest.mark.parametrize(
    ("files", "train", "held_out"),
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], [0, 1], [2]),
        (["train.jsonl", "validation.jsonl"], [0], [1]),
        (["dev.jsonl", "training.jsonl"], [1], [0]),
        (["gsm8k_test.jsonl", "gsm8k_train.jsonl"], [1], [0]),
        (["math-Train.jsonl", "math.TEST.jsonl"], [0], [1]),
        (["test.jsonl", "test2.jsonl", "test3.jsonl"], [0, 1, 2], [0, 1, 2]),
        (["a.jsonl", "b.jsonl"], [0, 1], [0, 1]),
        (["extra.jsonl", "train.jsonl"], [0, 1], [0, 1]),
        (["latest.jsonl", "trained.jsonl"], [0, 1], [0, 1]),
        (["data/test-0.jsonl", "data/train-0.jsonl"], [1], [0]),
        (["test/0.jsonl", "train/0.jsonl", "train/1.jsonl"], [1, 2], [0]),
        (["data/Train/a.parquet.jsonl", "data/validation/a.jsonl", "data/logs/a.jsonl"], [0], [1]),
        (["train/0.jsonl", "images/0.jsonl"], [0], [0]),
    ],
)
def test_shards_of_one_folder_are_told_apart_by_split(
    files: list[str], train: list[int], held_out: list[int], tmp_path: Path
) -> None:
    filled(tmp_path, *files, "README.md")
    assert names(tmp_path, "train") == [files[index] for index in train]
    assert names(tmp_path, "eval") == [files[index] for index in held_out]


@pytest.mark.parametrize(
    ("files", "split", "reason"),
    [
        (
            ["test.jsonl", "train.jsonl", "val.jsonl"],
            "eval",
            r'holds files for test and validation: .*eval_path = ".*/test.jsonl"',
        ),
        (["test.jsonl", "val.jsonl"], "train", r"holds files for test and validation, and none for training: "),
        (
            ["a.jsonl", "test.jsonl", "train.jsonl"],
            "train",
            r"for test and train, and a.jsonl, which says no split: name those",
        ),
        (["a.jsonl", "b.csv"], "train", r"files of several formats \(a.jsonl and b.csv\): name those that are meant"),
        (["train/a.jsonl", "test/a.jsonl", "val/a.jsonl"], "eval", r"holds folders for test and validation: .*/test\""),
        (["test/a.jsonl"], "train", r"its folders are test: name one"),
        (["sub/a.jsonl"], "train", r"holds no file that can be read .*; its folders are sub: name one"),
        ([".hidden.jsonl"], "train", r"holds no file that can be read"),
    ],
)
def test_a_folder_that_leaves_open_what_is_meant_is_refused(
    files: list[str], split: Split, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        names(filled(tmp_path, *files), split)


def test_json_beside_rows_of_another_format_describes_them(tmp_path: Path) -> None:
    assert names(filled(tmp_path, "dataset_infos.json", "a.csv"), "train") == ["a.csv"]
    assert names(filled(tmp_path / "more", "a.json", "b.json"), "train") == ["a.json", "b.json"]


def test_a_pattern_names_files(tmp_path: Path) -> None:
    filled(tmp_path, "train-1.jsonl", "train-0.jsonl", "test-0.jsonl", "[1].jsonl")
    assert names(tmp_path / "train-*.jsonl", "train") == ["train-0.jsonl", "train-1.jsonl"]
    assert names(tmp_path / "test-?.jsonl", "train") == ["test-0.jsonl"]
    assert names(tmp_path / "[1].jsonl", "train") == ["[1].jsonl"], "a file of that name"
    with pytest.raises(ValueError, match=r"no file is called like .*/none-\*\.jsonl: correct the pattern"):
        names(tmp_path / "none-*.jsonl", "train")
    with pytest.raises(ValueError, match=r"a\.txt, which \*\.txt means too, is none of the files"):
        names(filled(tmp_path, "a.txt") / "*.txt", "train")


def test_home_and_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, "data/a.jsonl", "$odd.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROWS", "data")
    monkeypatch.delenv("UNSET_ROWS", raising=False)
    for path in ("~/data/a.jsonl", "$HOME/data/a.jsonl", "${HOME}/$ROWS/a.jsonl", "~/$ROWS/*.jsonl"):
        assert names(path, "train") == ["data/a.jsonl"], path
        sources = [{"path": path, "weight": 2.0}]
        assert names("", "train", sources=sources, train_path="") == ["data/a.jsonl"]
    assert names(tmp_path / "$odd.jsonl", "train") == ["$odd.jsonl"]
    with pytest.raises(ValueError, match=r"\$UNSET_ROWS/a.jsonl: the variable \$UNSET_ROWS is not set where this runs"):
        names("$UNSET_ROWS/a.jsonl", "train")
    with pytest.raises(ValueError, match=r"~nobody-of-that-name/a: the home directory is not known"):
        names("~nobody-of-that-name/a", "train")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("data/a.jsonl.gz", "a"),
        ("data/train-*.parquet", "train"),
        ("data/gsm8k", "gsm8k"),
        ("v1.5", "v1.5"),
        ("d/*.csv", "d"),
    ],
)
def test_a_source_is_called_by_its_path(path: str, label: str) -> None:
    from gspo_services.tasks.environments.sources import SourceOptions

    assert SourceOptions(path=path).label == label
