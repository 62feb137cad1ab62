"""Configuration: what is wrong is named with its key, its value and the way out."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from gspo.settings import Objective
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_configuration, load_settings, require_model
from gspo_services.shared.settings.fingerprint import run_fingerprint
from gspo_services.shared.settings.keys import REMOVED, RENAMED, all_keys
from gspo_services.shared.settings.run_settings import read_run_settings, write_run_settings

ROOT = Path(__file__).parents[5]


def written(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def refusal(text: str, directory: Path, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(written(directory, text), overrides, environment)
    return str(caught.value)


def test_values_come_from_the_file_and_the_rest_are_defaults(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, "[batch]\nmax_lag = 0\n[run]\nseed = 7\n"), (), {})
    assert (settings.batch.max_lag, settings.run.seed) == (0, 7)
    assert settings.batch.mini_batches == 4


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[batch]\nmax_lag = 1\ngroup_size = 4\n[run]\nseed = 1\n")
    environment = {"GSPO_BATCH__MAX_LAG": "2", "GSPO_BATCH__GROUP_SIZE": "5", "GSPO_DATA_DIR": "x", "PATH": "/bin"}
    settings = load_settings(path, ["batch.max_lag=3"], environment)
    assert (settings.batch.max_lag, settings.batch.group_size, settings.run.seed) == (3, 5, 1)


def test_a_byte_order_mark_is_no_part_of_the_file_and_utf16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 7\r\n")
    assert load_settings(path, (), {}).run.seed == 7
    path.write_bytes("[run]\nseed = 7\n".encode("utf-16"))
    with pytest.raises(ConfigurationError, match=r"run\.toml: cannot be read: .*; save it as UTF-8"):
        load_settings(path, (), {})


def test_home_and_variables_are_filled_in_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("WORK", "/work/of/me")
    monkeypatch.delenv("UNSET_FOLDER", raising=False)
    path = written(
        tmp_path, '[run]\ndirectory = "~/runs/a"\n[model]\npath = "${WORK}/models"\n[security]\nkeys = "$WORK/keys"\n'
    )
    settings = load_settings(path, ["agent.python=~/venv/bin/python", "agent.function=m:f"], {})
    assert (settings.run.directory, settings.model.path) == (Path("/home/me/runs/a"), Path("/work/of/me/models"))
    assert (settings.security.keys, settings.agent.python) == ("/work/of/me/keys", "/home/me/venv/bin/python")
    assert (settings.rollout.python, settings.learner.python) == ("", "")
    assert "the variable $UNSET_FOLDER is not set where this runs" in refusal(
        '[model]\npath = "$UNSET_FOLDER/m"\n', tmp_path
    )


def test_overrides_read_values_as_toml_does_and_words_need_no_quotes(tmp_path: Path) -> None:
    overrides = [
        "environment.name=calculator",
        "environment.options.digits=3",
        'rollout.server_args=["--a", "b"]',
        "objective.normalise_by_std = false",
        "learner.learning_rate=1e-3",
        "run.directory=runs/a=b",
    ]
    settings = load_settings(None, overrides, {})
    assert settings.environment.name == "calculator"
    assert settings.environment.options == {"digits": 3}
    assert settings.rollout.server_args == ["--a", "b"]
    assert settings.objective.normalise_by_std is False
    assert settings.learner.learning_rate == 1e-3
    assert settings.run.directory == Path("runs/a=b")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[batch]\nmaxlag = 2\n", ["batch.maxlag: unknown key", "did you mean 'max_lag'?"]),
        ("[bacth]\nmax_lag = 2\n", ["bacth: unknown key", "did you mean 'batch'?"]),
        ("[evaluation]\nxyz = 2\n", ["evaluation.xyz: unknown key", "known: best_by, every_batches"]),
        ("[sampling]\ntemperature = 0\n", ["sampling.temperature is 0", "use a value such as 1.0"]),
        ("[sampling]\ntemperature = -1\n", ["sampling.temperature is -1", "greater than or equal to 0"]),
        ("[sampling]\ntop_p = 0.9\n", ["sampling.top_p is 0.9", "use top_p = 1.0 and top_k = -1"]),
        ("[sampling]\ntop_k = 50\n", ["sampling.top_k is 50", "use top_p = 1.0 and top_k = -1"]),
        ("[sampling]\nmax_turn_tokens = 64\nmax_tokens = 64\n", ["sampling.max_turn_tokens is 64", "shorter"]),
        ("[batch]\ngroup_size = 1\n", ["batch.group_size is 1", "greater than or equal to 2"]),
        (
            "[batch]\ngroups_per_batch = 10\nmini_batches = 4\n",
            ["batch.groups_per_batch is 10", "batch.mini_batches is 4", "multiple"],
        ),
        ("[objective]\neps_low = 0.2\neps_high = 0.27\n", ["objective.eps_low is 0.2, eps_high is 0.27", "'token'"]),
        ("[objective]\neps_high = 0.2\n", ["eps_high is 0.2 with", "3e-4 / 4e-4"]),
        ("[learner]\nlearning_rate = nan\n", ["learner.learning_rate is nan", "finite number"]),
        (
            '[objective]\nsurrogate = "cispo"\nratio_unit = "token"\neps_high = 0.27\n',
            ["objective.eps_high is 0.27 with surrogate 'cispo'", "Leave eps_high out"],
        ),
        (
            '[objective]\nsurrogate = "cispo"\nratio_unit = "token"\nm2po_bound = 0.1\n',
            ["objective.m2po_bound is 0.1 with surrogate 'cispo'", "set surrogate = 'm2po'"],
        ),
        ("[objective]\nnoise_z = inf\n", ["objective.noise_z is inf", "finite number"]),
        ("[objective]\nadaptive_clip_target = 1.0\n", ["objective.adaptive_clip_target is 1.0", "(0.0, 1.0)"]),
        ("[learner]\nnode_rank = 1\n", ["learner.node_rank is 1 of 1 machines", "counts from 0"]),
        (
            "[learner]\nnum_nodes = 2\n",
            ["learner.rendezvous_address is ''", "learner.num_nodes is 2", "HOST:PORT of machine 0"],
        ),
        (
            "[learner]\nnum_nodes = 2\nrendezvous_address = 'learner-0:port'\n",
            ["learner.rendezvous_address is 'learner-0:port'", "such as learner-0:29500"],
        ),
        (
            "[learner]\nnum_nodes = 2\nrendezvous_address = 'learner-0:65536'\n",
            ["learner.rendezvous_address is 'learner-0:65536'"],
        ),
        ("[learner]\nnum_nodes = 2\nrendezvous_address = ':29500'\n", ["learner.rendezvous_address is ':29500'"]),
        (
            "[learner]\ndtype = 'bfloat16'\nzero_stage = 0\n",
            ["learner.dtype is 'bfloat16' but learner.zero_stage is 0", "use zero_stage 1 or higher"],
        ),
        (
            "[learner]\noffload = 'optimizer'\nzero_stage = 0\n",
            ["learner.offload is 'optimizer' but learner.zero_stage is 0", "use zero_stage 1 or higher"],
        ),
        (
            "[learner]\noffload = 'optimizer_and_parameters'\nzero_stage = 2\n",
            ["learner.offload is 'optimizer_and_parameters'", "zero_stage is 2", "use zero_stage 3, or offload = optimizer"],
        ),
        ("[learner]\noffload = 'gpu'\n", ["learner.offload is 'gpu'", "'optimizer_and_parameters'"]),
        ("[learner]\nbetas = [0.9, 1.0]\n", ["learner.betas.1 is 1.0", "less than 1"]),
        ("[learner]\nrouter_rate_factor = -1\n", ["learner.router_rate_factor is -1", "greater than or equal to 0"]),
        ("[learner]\nrouter_rate_factor = nan\n", ["learner.router_rate_factor is nan", "finite number"]),
        ("[model]\nfloat32_head = 'some'\n", ["model.float32_head is 'some'"]),
        ("[learner]\nadam_eps = 0\n", ["learner.adam_eps is 0", "greater than 0"]),
        ("[learner]\nadam_eps = -1e-8\n", ["learner.adam_eps is -1e-08", "greater than 0"]),
        ("[learner]\nadam_eps = 1e-46\n", ["learner.adam_eps is 1e-46", "the weight be lost; use 1e-20 or more"]),
        ("[learner]\nadam_eps = 9e-21\n", ["learner.adam_eps is 9e-21", "use 1e-20 or more"]),
        ("[run]\nseed = {a = 1}\n", ["run.seed is {'a': 1}", "valid integer"]),
        ("[run]\nseed = 1.5\n", ["run.seed is 1.5", "valid integer"]),
        ("run = 3\n", ["run is 3", "Run"]),
        ("[broker]\nlease_s = 0\n", ["broker.lease_s is 0", "greater than 0"]),
        ("[rollout]\npause_mode = 'abort'\n", ["rollout.pause_mode is 'abort'", "'retract' or 'in_place'"]),
        (
            "[rollout]\nmax_total_tokens = 512\n[sampling]\nmax_tokens = 1024\n",
            ["rollout.max_total_tokens is 512", "sampling.max_tokens is 1024", "raise the first"],
        ),
        (
            "[broker]\nidle_lease_s = 300\n",
            ["broker.idle_lease_s is 300", "rollout.engine_timeout_s is 300", "raise the first"],
        ),
        (
            "[learner]\nweights_endpoint = 'tcp://0.0.0.0:7003'\n",
            ["learner.weights_endpoint is 'tcp://0.0.0.0:7003'", "learner.advertised_weights_endpoint"],
        ),
        (
            "[learner]\nadvertised_weights_endpoint = 'tcp://learner'\n",
            ["learner.advertised_weights_endpoint is 'tcp://learner'", "expected tcp://HOST:PORT"],
        ),
        (
            "[rollout]\npeer_weights_endpoint = 'tcp://0.0.0.0:7004'\n",
            ["rollout.peer_weights_endpoint is 'tcp://0.0.0.0:7004'", "this host's own"],
        ),
        ("[rollout]\nserver_args = ['--tp-size', '2']\n", ["--tp-size 2", "use rollout.tensor_parallel"]),
        ("[rollout]\nserver_args = ['--ep=2']\n", ["--ep 2", "use rollout.expert_parallel"]),
        ("[rollout]\nserver_args = ['--pp-size', '2']\n", ["--pp-size 2", "cannot be verified"]),
        ("[rollout]\nserver_args = ['--nnodes=2']\n", ["--nnodes 2", "in this one's memory", "rollout.tensor_parallel"]),
        ("[rollout]\nserver_args = ['--enable-dp-attention']\n", ["--enable-dp-attention", "remove it"]),
        (
            "[rollout]\nserver_args = ['--speculative-algorithm', 'EAGLE']\n",
            ["--speculative-algorithm", "were never compared with the learner's; remove it"],
        ),
        ("[rollout]\nserver_args = ['--quantization=fp8']\n", ["--quantization", "no update could be verified", "bfloat16"]),
        (
            "[rollout]\nserver_args = ['--load-format', 'flash_rl']\n",
            ["--load-format flash_rl", "no update could be verified"],
        ),
        (
            "[rollout]\nserver_args = ['--json-model-override-args={\"quantization_config\": {}}']\n",
            ["--json-model-override-args", "the learner would train another one; remove it"],
        ),
        (
            "[rollout]\npeer_weights_endpoint = 'tcp://10.0.3.7:7004'\n",
            ["rollout.peer_weights_endpoint is 'tcp://10.0.3.7:7004'", "security.keys"],
        ),
    ],
)
def test_a_refusal_names_the_file_the_key_the_value_and_the_way_out(text: str, parts: list[str], tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert message.startswith(str(tmp_path / "run.toml"))
    for part in parts:
        assert part in message


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    message = refusal("[batch]\ngroup_size = 1\n[run]\nnum_batches = 0\nsed = 1\n", tmp_path)
    assert "batch.group_size" in message
    assert "run.num_batches" in message
    assert "did you mean 'seed'?" in message


def test_the_papers_grpo_clip_is_allowed_for_token_ratios(tmp_path: Path) -> None:
    text = '[objective]\nratio_unit = "token"\neps_low = 0.2\neps_high = 0.27\n'
    assert load_settings(written(tmp_path, text), (), {}).objective.eps_high == 0.27


def test_a_bound_address_is_allowed_when_another_is_advertised(tmp_path: Path) -> None:
    text = "[learner]\nweights_endpoint = 'tcp://*:7003'\nadvertised_weights_endpoint = 'tcp://learner:7003'\n"
    text += "[security]\nkeys = 'keys'\n"
    assert load_settings(written(tmp_path, text), (), {}).learner.weights_endpoint == "tcp://*:7003"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("batch.max_lag", "expected section.key=value"),
        ("max_lag=2", "expected section.key"),
        ("batch.=2", "expected section.key"),
        ("batch.max_lag=-1", "batch.max_lag is -1"),
        ("batch.maxlag=1", "did you mean 'max_lag'?"),
        ("run.seed.deep=1", "seed is a value, not a section"),
    ],
)
def test_a_broken_override_is_quoted(override: str, part: str, tmp_path: Path) -> None:
    message = refusal("[run]\nseed = 3\n", tmp_path, override)
    assert part in message


def test_a_misspelt_environment_variable_is_refused_by_its_key(tmp_path: Path) -> None:
    assert "did you mean 'max_lag'?" in refusal("", tmp_path, GSPO_BATCH__MAXLAG="2")
    assert "did you mean 'batch'?" in refusal("", tmp_path, GSPO_BATSH__MAX_LAG="2")
    assert "GSPO_BATCH__" in refusal("", tmp_path, GSPO_BATCH__="2")


def test_a_missing_file_points_to_the_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml: no such file; examples are in examples/"):
        load_settings(tmp_path / "absent.toml", (), {})


def test_broken_toml_is_told_with_its_line(tmp_path: Path) -> None:
    assert "not valid TOML" in refusal("[run]\nseed = = 3\n", tmp_path)
    assert "line 2" in refusal("[run]\nseed = = 3\n", tmp_path)


def test_what_only_one_process_can_read_is_no_configuration() -> None:
    for path in (Path("-"), Path("/dev/stdin"), Path("/dev/fd/63"), Path("/proc/self/fd/0")):
        with pytest.raises(ConfigurationError, match="save it as a file"):
            load_settings(path)


def test_a_file_that_is_no_text_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(path, (), {})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(tmp_path, (), {})


def test_settings_cannot_be_changed_after_they_were_loaded() -> None:
    settings = load_settings(None, (), {})
    with pytest.raises(ValidationError, match="frozen"):
        settings.batch.max_lag = 3  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    settings = load_settings(path, (), {})
    assert settings.run.directory.name == path.stem
    if settings.agent.python:
        assert os.path.normpath(settings.agent.python).startswith(f"{ROOT}/.venv-frameworks/"), "where the Makefile makes it"


def test_the_section_is_the_librarys_objective_with_the_files_values(tmp_path: Path) -> None:
    text = '[objective]\nclip_range_growth = -0.5\nadaptive_clip_target = 0.15\nanchor = "proximal"\ntis_cap = 1.3\n'
    objective = load_settings(written(tmp_path, text), (), {}).objective
    assert isinstance(objective, Objective)
    expected = Objective(anchor="proximal", clip_range_growth=-0.5, adaptive_clip_target=0.15, tis_cap=1.3)
    assert {each.name: getattr(objective, each.name) for each in fields(Objective)} == asdict(expected)


@pytest.mark.parametrize("mode", ["truncate", "reject"])
def test_a_file_with_the_behaviour_anchor_cannot_ask_for_a_mismatch_weight(mode: str, tmp_path: Path) -> None:
    text = f'[objective]\nanchor = "behaviour"\ntis_mode = "{mode}"\n'
    assert f"objective.tis_mode is '{mode}' with anchor 'behaviour'" in refusal(text, tmp_path)


@pytest.mark.parametrize("line", ["", 'tis_mode = "off"\n'])
def test_a_file_with_the_behaviour_anchor_has_no_mismatch_weight(line: str, tmp_path: Path) -> None:
    text = f'[objective]\nanchor = "behaviour"\n{line}'
    assert load_settings(written(tmp_path, text), (), {}).objective.weight_mode == "off"


def test_the_ranges_of_several_objective_keys_are_judged_at_once(tmp_path: Path) -> None:
    message = refusal("[objective]\neps_low = 0\nnoise_z = -1\nratio_unit = 'word'\nadvantage = 3\n", tmp_path)
    for part in (
        "objective.eps_low is 0.0",
        "objective.noise_z is -1.0",
        "objective.ratio_unit is",
        "objective.advantage is 3",
    ):
        assert part in message


NEW_NAMES = {"objective.band_growth": "objective.clip_range_growth", "rollout.reward_workers": "reward.workers"}


def renamed(path: Path | None, overrides: Sequence[str] = (), **environment: str) -> str:
    """What is said about a configuration with the old names of NEW_NAMES."""
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(path, overrides, environment, renamed=NEW_NAMES)
    return str(caught.value)


def test_a_renamed_key_is_answered_with_where_it_is_set_its_value_and_its_new_name(tmp_path: Path) -> None:
    path = written(tmp_path, "[objective]\nband_growth = 0.5\n")
    says = "objective.band_growth is 0.5: the key is now called objective.clip_range_growth"
    assert renamed(path) == f"{path}: {says}"
    variable = "GSPO_OBJECTIVE__BAND_GROWTH"
    assert renamed(None, **{variable: "0.5"}) == f"environment {variable}: {says}"
    assert renamed(None, ["objective.band_growth=0.5"]) == f"--set objective.band_growth=0.5: {says}"


def test_all_renamed_keys_are_said_at_once_also_beside_their_new_names(tmp_path: Path) -> None:
    path = written(tmp_path, '[rollout]\nreward_workers = "two"\n[objective]\nclip_range_growth = 0.1\n')
    assert renamed(path, ["objective.band_growth=1"]) == (
        "--set objective.band_growth=1: objective.band_growth is 1: the key is now called objective.clip_range_growth\n"
        f"{path}: rollout.reward_workers is 'two': the key is now called reward.workers"
    )


def test_a_name_that_was_never_renamed_is_an_unknown_key(tmp_path: Path) -> None:
    path = written(tmp_path, "[objective]\nband_growth = 0.5\n")
    with pytest.raises(ConfigurationError, match=r"objective\.band_growth: unknown key"):
        load_configuration(path, (), {}, renamed={"objective.band": "objective.clip_range_growth"})


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ('variables = ["A=1"]', "reward.variables holds 'A=1': give names of variables only"),
        ('variables = ["TMPDIR"]', "reward.variables holds 'TMPDIR', for which each worker gets a separate value"),
        ('on_deadline = "drop"', "reward.on_deadline is 'drop'"),
        ("workers = 0", "reward.workers is 0"),
        ("memory_bytes = 1000", "reward.memory_bytes is 1000"),
        ('model_device = "cuda"', 'reward.model_device is \'cuda\': expected "cpu", or a GPU such as "cuda:0"'),
        ("model_weight = nan", "reward.model_weight is nan"),
        ('model_input = "ids"', "reward.model_input is 'ids'"),
        (
            'model = "rm"\n[agent]\nfunction = "my:solve"',
            "/rm' and an agent plays, which returns its reward",
        ),
    ],
)
def test_a_wrong_setting_of_the_rewards_is_named_with_its_value(tmp_path: Path, table: str, text: str) -> None:
    assert text in refusal(f"[reward]\n{table}\n", tmp_path)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("rank = -1", "lora.rank is -1: Input should be greater than or equal to 0"),
        ("alpha = 0", "lora.alpha is 0: Input should be greater than 0"),
        ("target_modules = []", "lora.target_modules is []: List should have at least 1 item"),
        ('target_modules = ["router"]', "'attention', 'mlp' or 'experts'"),
        (
            'target_modules = ["attention", "attention"]',
            "lora.target_modules names attention more than once; name each once",
        ),
        ("ranks = 8", "lora.ranks: unknown key; did you mean 'rank'?"),
        ('publish = "adapter"', 'lora.publish is "adapter" and lora.rank is 0'),
        (
            'rank = 8\npublish = "adapter"\ntarget_modules = ["attention", "experts"]',
            "lora.target_modules names experts: only adapters of attention are published as such; use target_modules = "
            '["attention"], or publish = "merged"',
        ),
        ("max_loaded_loras = 1", "lora.max_loaded_loras is 1: Input should be greater than or equal to 2"),
        (
            'rank = 8\npublish = "adapter"\n[rollout]\ntensor_parallel = 2',
            'lora.publish is "adapter" and rollout.tensor_parallel is 2: the model below adapters can only be verified in a',
        ),
        (
            'rank = 8\npublish = "adapter"\n[rollout]\npause_mode = "in_place"\n[batch]\nmax_lag = 3',
            'rollout.pause_mode is "in_place", batch.max_lag is 3 and lora.max_loaded_loras is 3',
        ),
        (
            'rank = 8\nadapters = ["a", "b"]\nadapter_field = "kind"',
            "lora.adapters are a, b and lora.publish is 'merged': merged weights would have one of them",
        ),
        (
            'rank = 8\npublish = "adapter"\nadapters = ["a", "b"]',
            "lora.adapters are a, b and lora.adapter_field is empty: name the field of a task that says whose it is",
        ),
        *(
            (
                f'rank = 8\npublish = "adapter"\nadapters = {names}\nadapter_field = "kind"',
                "expected 2 to 16 names, each once, of 1 to 32 letters, digits, _, - and .",
            )
            for names in (
                '["a"]',
                '["a", "a"]',
                '["a", "b/c"]',
                '["a", ".b"]',
                '["a", ""]',
                "[]",
                str([f"a{n}" for n in range(17)]),
            )
        ),
    ],
)
def test_a_wrong_setting_of_the_adapters_is_named_with_its_value(tmp_path: Path, table: str, text: str) -> None:
    assert text in refusal(f"[lora]\n{table}\n", tmp_path)


def test_in_place_each_version_that_may_be_under_way_can_have_its_adapter() -> None:
    overrides = [
        "lora.rank=8",
        "lora.publish=adapter",
        "rollout.pause_mode=in_place",
        "batch.max_lag=3",
        "lora.max_loaded_loras=4",
    ]
    assert load_settings(None, overrides, {}).lora.max_loaded_loras == 4
    merged = load_settings(None, ["rollout.pause_mode=in_place", "batch.max_lag=9", "lora.rank=8"], {})
    assert merged.lora.publish == "merged"


def test_without_a_rank_there_are_no_adapters(tmp_path: Path) -> None:
    assert not load_settings(None, (), {}).lora.is_used
    assert not load_settings(ROOT / "examples" / "lora.toml", ["lora.rank=0"], {}).lora.is_used
    assert load_settings(None, ["lora.rank=1"], {}).lora.is_used


def test_renamed_keys_lead_to_keys_that_exist_and_from_keys_that_do_not() -> None:
    assert set(RENAMED.values()) <= all_keys().keys()
    assert not RENAMED.keys() & all_keys().keys()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_each_old_name_in_a_file_is_answered_with_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    section, _, key = old.partition(".")
    path = written(tmp_path, f"[{section}]\n{key} = 3\n")
    with pytest.raises(ConfigurationError) as refused:
        load_settings(path, (), {})
    assert f"{path}: {old} is 3: " in str(refused.value)
    assert new in str(refused.value)


def test_keys_that_are_removed_are_not_there() -> None:
    assert not REMOVED.keys() & all_keys().keys()


@pytest.mark.parametrize(("key", "text"), REMOVED.items())
def test_each_removed_key_is_answered_with_its_value_and_the_way_out(tmp_path: Path, key: str, text: str) -> None:
    section, _, name = key.partition(".")
    path = written(tmp_path, f"[{section}]\n{name} = 3\n")
    with pytest.raises(ConfigurationError) as refused:
        load_settings(path, (), {})
    assert str(refused.value) == f"{path}: {key} is 3: {text}"
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, [f"{key}=1"], {})
    assert str(refused.value) == f"--set {key}=1: {key} is 1: {text}"


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, "[batch]\nmax_lag = 1\ngroup_size = 4\n[environment.options]\na = 1\nb = 2\n")
    overrides = ["batch.max_lag=3", "environment.options.a=5"]
    found = load_configuration(path, overrides, {"GSPO_BATCH__GROUP_SIZE": "5", "GSPO_RUN__SEED": "7"})
    assert found.sources == {
        "batch.max_lag": "--set batch.max_lag=3",
        "batch.group_size": "environment GSPO_BATCH__GROUP_SIZE",
        "run.seed": "environment GSPO_RUN__SEED",
        "environment.options": f"{path}, --set environment.options.a=5",
    }
    assert found.settings.environment.options == {"a": 5, "b": 2}


def test_a_refusal_names_the_override_or_the_variable_that_set_the_value(tmp_path: Path) -> None:
    message = refusal("[run]\nseed = -1\n", tmp_path, "batch.max_lag=-2", GSPO_BATCH__GROUP_SIZE="1", GSPO_RUN__SED="1")
    assert "run.seed is -1: " in message
    assert "batch.max_lag is -2 (--set batch.max_lag=-2): " in message
    assert "batch.group_size is 1 (environment GSPO_BATCH__GROUP_SIZE): " in message
    assert "run.sed: unknown key (environment GSPO_RUN__SED); did you mean 'seed'?" in message


DEEP = 60


@pytest.mark.parametrize(
    ("plain", "part"),
    [
        ("[]", "is []: Input should be"),
        ("null", "is None: Input should be"),
        ('{"objective": 3}', "objective is 3: Input should be a table of keys"),
        ('{"objective": {"eps_low": "x"}}', "objective.eps_low is 'x': Input should be a valid number"),
        ('{"objective": {"eps_low": [1]}}', "objective.eps_low is [1]"),
        ('{"objective": {"eps_lo": 1}}', "objective.eps_lo: unknown key; did you mean 'eps_low'?"),
        ('{"objective": {"eps_low": NaN}}', "objective.eps_low is nan: expected a finite number"),
        ('{"learner": {"betas": [0.9, Infinity]}}', "learner.betas is inf: expected a finite number"),
        ('{"learner": {"betas": [0.9]}}', "learner.betas.1 is [0.9]"),
        ('{"batsh": {}}', "batsh: unknown key; did you mean 'batch'?"),
        ('{"environment": {"options": ' + "[" * DEEP + "]" * DEEP + "}}", "more than 32 levels"),
        ("[" * 100_000 + "]" * 100_000, "cannot be read"),
        ('{"run": {"seed": ' + "9" * 5000 + "}}", "cannot be read"),
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_settings_file_is_refused_by_its_key(plain: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(plain)
    with pytest.raises(ConfigurationError) as caught:
        read_run_settings(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "settings.json"))
    assert part in str(caught.value)


def test_a_run_of_before_a_key_is_read_as_what_it_did(tmp_path: Path) -> None:
    write_run_settings(load_settings(written(tmp_path, f"[run]\ndirectory = '{tmp_path}'\n"), (), {}))
    path = tmp_path / "settings.json"
    plain = json.loads(path.read_text())
    assert read_run_settings(tmp_path).learner.spread_masters == "evenly"
    path.write_text(json.dumps(plain | {"learner": plain["learner"] | {"spread_masters": True}}))
    assert read_run_settings(tmp_path).learner.spread_masters is True, "a recorded run keeps its rule for powers of two"
    del plain["learner"]["spread_masters"]
    path.write_text(json.dumps(plain))
    assert not read_run_settings(tmp_path).learner.spread_masters


def test_the_settings_that_a_broker_writes_are_those_that_others_read(tmp_path: Path) -> None:
    text = f"[run]\ndirectory = '{tmp_path}'\n[objective]\nanchor = 'behaviour'\nadvantage = 'turn'\nlog_ratio_clamp = 5\n"
    settings = load_settings(written(tmp_path, text), (), {})
    write_run_settings(settings)
    again = read_run_settings(tmp_path)
    assert again == settings
    assert (again.objective.advantage, again.objective.log_ratio_clamp) == ("turn", 5.0)
    assert run_fingerprint(again) == run_fingerprint(settings)


def test_a_model_whose_files_lead_out_of_it_is_refused_before_the_run_and_not_after_it(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "cache" / "models--a--b" / "blobs"
    model.mkdir()
    store.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (store / "5e").write_text("{}")
    (tmp_path / "weights").write_text("")
    (model / "tokenizer.json").symlink_to(store / "5e")
    (model / "model.safetensors").symlink_to(tmp_path / "weights")
    require_model(model)
    (tmp_path / "secret").write_text("")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match=r"notes.txt is a link out of it, and would be published"):
        require_model(model)
