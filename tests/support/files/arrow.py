"""Datasets on disk, as Hugging Face's ``Dataset.save_to_disk`` writes them (datasets/arrow_dataset.py)."""

import json
from pathlib import Path
from typing import Any

import pyarrow


def saved_dataset(folder: Path, *shards: list[dict[str, Any]]) -> Path:
    """A dataset with these rows in its shards."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0" * 16,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder
