"""What the broker refuses before it begins, and where its tasks come from."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gspo_services.broker.entry import require_batch_fits, require_no_copy_of_a_live_run, tasks_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import override_settings, read_run_settings
from gspo_services.shared.settings.configuration import validated
from tests.support.broker.damage import open_store
from tests.support.processes.small_run import write_small_run


def settings_of(environment: str, **agent: str) -> Any:
    return validated({"environment": {"name": environment}, "agent": agent}, "test")


def test_an_agent_needs_only_tasks() -> None:
    for name in ("shop", "arithmetic"):
        assert set(tasks_of(settings_of(name, function="a:solve"))) == {"train", "eval"}


def test_without_an_agent_tasks_alone_are_refused_before_anything_is_written() -> None:
    assert set(tasks_of(settings_of("arithmetic"))) == {"train", "eval"}
    with pytest.raises(ConfigurationError, match=r'"shop" has tasks and nothing that plays them: name an agent'):
        tasks_of(settings_of("shop"))


def test_a_run_without_evaluations_needs_no_held_out_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "#### 2"}\n')
    environment = {"name": "dataset", "options": {"train_path": str(rows)}}
    assert set(tasks_of(validated({"environment": environment, "evaluation": {"every_batches": 0}}, "test"))) == {"train"}
    with pytest.raises(ConfigurationError, match="the dataset environment needs eval_path"):
        tasks_of(validated({"environment": environment}, "test"))


def a_run_of(groups: int, size: int, tokens: int) -> Any:
    plain = {
        "batch": {"groups_per_batch": groups, "group_size": size, "mini_batches": 1},
        "sampling": {"max_tokens": tokens, "max_turn_tokens": tokens - 1},
        "rollout": {"max_total_tokens": max(256, 2 * tokens)},
    }
    return validated(plain, "test")


def test_a_batch_of_any_size_that_its_description_can_name_is_taken() -> None:
    require_batch_fits(a_run_of(128, 16, 32_768))
    require_batch_fits(a_run_of(4096, 16, 65_536))
    with pytest.raises(ConfigurationError, match=r"is 65552: 65536 allowed"):
        require_batch_fits(a_run_of(4097, 16, 64))
    with pytest.raises(
        ConfigurationError, match=r"65536 trajectories of sampling.max_tokens = 65537 .* use smaller batches"
    ):
        require_batch_fits(a_run_of(4096, 16, 65_537))


def test_a_copy_of_a_run_does_not_start_beside_it_and_a_moved_run_does(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = override_settings(read_run_settings(tmp_path / "run"), [f"run.directory={tmp_path / 'copy'}"])
    require_no_copy_of_a_live_run(copy, "run")
    with open_store(tmp_path / "run"):
        with pytest.raises(
            ConfigurationError, match=rf"a copy of {tmp_path / 'run'}, whose broker is running, and both are run"
        ):
            require_no_copy_of_a_live_run(copy, "run")
        require_no_copy_of_a_live_run(copy, "restored")
        require_no_copy_of_a_live_run(read_run_settings(tmp_path / "run"), "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = override_settings(read_run_settings(tmp_path / "moved"), [f"run.directory={tmp_path / 'moved'}"])
    with open_store(tmp_path / "moved") as store:
        require_no_copy_of_a_live_run(moved, store.run_id)
