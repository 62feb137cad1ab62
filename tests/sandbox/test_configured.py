"""A rollout scores programs where its configuration says."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.opening import GradedEnvironment, open_user_code
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, load_settings
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds
from gspo_services.tasks.sandbox.wire import KEY_VARIABLE
from tests.sandbox.conftest import KEY
from tests.sandbox.programs.scoring import ADD, ADDITION, fenced
from tests.support.sandboxes import serving

pytestmark = pytest.mark.sandbox

BOUNDS = SandboxBounds(max_wall_s=120, max_memory_bytes=4 << 30, idle_s=60)


def configured(folder: Path, url: str) -> Settings:
    """A run with the environment ``code`` and one task, whose programs run at ``url``."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(ADDITION) + "\n")
    overrides = ["environment.name=code", f'environment.options={{train_path = "{path}"}}', f'sandbox.urls=["{url}"]']
    return load_settings(None, [*overrides, "sandbox.acquire_timeout_s=5"], {})


async def test_programs_of_the_policy_run_on_the_server_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with (
        LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as local,
        serving(local, max_sandboxes=1, key=KEY, bounds=BOUNDS) as (_, url, metrics),
        open_user_code(configured(tmp_path, url), "rollout-0", RolloutMetrics(CollectorRegistry())) as player,
    ):
        assert isinstance(player, GradedEnvironment)
        before = metrics.runs.labels(ending="exit")._value.get()
        assert before >= 1, "the trial that a start makes"
        task = player.environment.tasks("train").task(0)
        for program, reward in ((ADD, 1.0), ("print(3)", 0.0)):
            step = player.environment.step(player.environment.start(task, 0).state, fenced(program))
            result = await player.rewards.grade(step.reward.for_task(task))
            assert (result.reward, result.failure) == (reward, None)
        assert metrics.runs.labels(ending="exit")._value.get() > before


async def test_a_rollout_with_a_wrong_key_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "another-key-of-sixteen")
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as local:
        async with serving(local, max_sandboxes=1, key=KEY, bounds=BOUNDS) as (_, url, _):
            settings = configured(tmp_path, url)
            with pytest.raises(ConfigurationError, match="refuses the key: set GSPO_SANDBOX_KEY here"):
                async with open_user_code(settings, "rollout-0", RolloutMetrics(CollectorRegistry())):
                    raise AssertionError("it has started")
