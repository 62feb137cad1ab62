"""An export that cannot be written."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from gspo_services.learner.export import ExportError, export_model
from gspo_services.shared.runtime.errors import EXIT_NO_ROOM, ServiceError, exit_status
from tests.support.processes.small_disk import small_disk

MIB = 1 << 20


def starting_model(directory: Path) -> Path:
    """A directory with nothing but a configuration."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


class OneWeight:
    """An engine with 1 MiB of weights in four tensors; it counts how many were asked for."""

    rank = 0
    model = SimpleNamespace(generation_config=None, dtype=torch.float32)

    def __init__(self) -> None:
        self.num_gathered = 0

    def serving_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            self.num_gathered += 1
            if self.rank == 0:
                yield f"w{index}", torch.full((MIB // 16,), float(index))

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def export(engine: OneWeight, destination: Path, tokenizer_from: Path) -> Path:
    return export_model(engine, destination, tokenizer_from=tokenizer_from, max_shard_bytes=MIB // 4)  # type: ignore[arg-type]


def test_a_link_out_of_the_models_folder_is_not_published_and_one_into_the_hubs_store_is(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b" / "snapshots" / "0123"
    (blob := tmp_path / "models--a--b" / "blobs" / "5e").parent.mkdir(parents=True)
    model.mkdir(parents=True)
    blob.write_text("{}")
    for name in ("tokenizer.json", "config.json"):
        (model / name).symlink_to("../../blobs/5e")
    (made := model / "additional_chat_templates").mkdir()
    (made / "tool_use.jinja").write_text("x")
    done = export(OneWeight(), tmp_path / "export", model)
    assert (done / "tokenizer.json").read_text() == "{}"
    assert not (done / "tokenizer.json").is_symlink()
    assert (done / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    (secret := tmp_path / "id_rsa").write_text("secret")
    for place in (model, made):
        (place / "notes.txt").symlink_to(secret)
        with pytest.raises(ExportError, match=r"notes.txt is a link out of the model's folder, and would be published"):
            export(OneWeight(), tmp_path / "export", model)
        (place / "notes.txt").unlink()
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_an_export_without_room_fails_on_all_ranks_with_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    starting_model(tmp_path / "model")
    with small_disk(tmp_path / "run", 4 * MIB) as disk:
        before = export(OneWeight(), disk.path / "export", tmp_path / "model")
        for room in (0, MIB // 2):  # no room at all, room for a part
            disk.fill(room)
            engine = OneWeight()
            with pytest.raises(ExportError, match=r"export cannot be written: .* make room .* checkpoint, which is intact"):
                export(engine, disk.path / "export", tmp_path / "model")
            assert engine.num_gathered == 4
            disk.empty()
            assert [path.name for path in disk.path.iterdir()] == ["export"]
        assert load_file(before / "model-00004-of-00004.safetensors")["w3"][0] == 3.0
        export(OneWeight(), disk.path / "export", tmp_path / "model")


def test_however_much_room_is_missing_the_reason_is_one_sentence(tmp_path: Path) -> None:
    """Room for some tensors, for all of them, for the model's configuration, for a part of the tokenizer's files."""

    class RealModel(OneWeight):
        model = SimpleNamespace(generation_config=GenerationConfig(), dtype=torch.float32)

    starting_model(tmp_path / "model")
    for number in range(3):
        (tmp_path / "model" / f"tokenizer-{number}.json").write_bytes(b"x" * 40_000)
    num_failed = 0
    with small_disk(tmp_path / "run", 2 * MIB) as disk:
        for pages in range(0, 320, 16):
            disk.fill(4096 * pages)
            try:
                export(RealModel(), disk.path / "export", tmp_path / "model")
            except ExportError as error:
                num_failed += 1
                assert "\n" not in str(error)
                statuses = exit_status(partial(_raise, error))
                assert statuses == EXIT_NO_ROOM, error
            else:
                shutil.rmtree(disk.path / "export")
            disk.empty()
            assert list(disk.path.iterdir()) == []
    assert 12 < num_failed < 20


def _raise(error: Exception) -> None:
    raise error


def test_the_other_ranks_are_told_that_the_first_could_not_write(tmp_path: Path) -> None:
    class Second(OneWeight):
        rank = 1

        def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + 1

    starting_model(tmp_path / "model")
    engine = Second()
    with pytest.raises(ServiceError, match="rank 0 could not; its log has the reason"):
        export(engine, tmp_path / "export", tmp_path / "model")
    assert engine.num_gathered == 4


def test_a_configuration_is_copied_with_keys_that_transformers_does_not_know(tmp_path: Path) -> None:
    model = starting_model(tmp_path / "model")
    content = {"model_type": "qwen3", "full_attention_interval": 4, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(content))
    export(OneWeight(), tmp_path / "export", model)
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == content | {"torch_dtype": "float32"}
    with pytest.raises(ValueError, match=r"without config\.json"):
        export(OneWeight(), tmp_path / "export", tmp_path)
