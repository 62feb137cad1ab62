"""Configuration: what is wrong is named with its key, its value and the way out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from gspo.settings import Objective
from services.runtime.errors import ConfigurationError
from services.runtime.settings.configuration import load_settings
from services.runtime.settings.objective import objective_of
from services.runtime.settings.sections import Section, Settings

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
        ("[evaluation]\nxyz = 2\n", ["evaluation.xyz: unknown key", "known keys: every_batches, num_tasks"]),
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
        ("[objective]\nnoise_z = inf\n", ["objective.noise_z is inf", "finite number"]),
        ("[objective]\nadaptive_clip_target = 1.0\n", ["objective.adaptive_clip_target is 1.0", "less than 1"]),
        ("[learner]\nnode_rank = 1\n", ["learner.node_rank is 1 of 1 machines", "counts from 0"]),
        (
            "[learner]\nnum_nodes = 2\n",
            ["learner.meeting_address is ''", "learner.num_nodes is 2", "HOST:PORT of machine 0"],
        ),
        (
            "[learner]\nnum_nodes = 2\nmeeting_address = 'learner-0:port'\n",
            ["learner.meeting_address is 'learner-0:port'", "such as learner-0:29500"],
        ),
        (
            "[learner]\nnum_nodes = 2\nmeeting_address = 'learner-0:65536'\n",
            ["learner.meeting_address is 'learner-0:65536'"],
        ),
        ("[learner]\nnum_nodes = 2\nmeeting_address = ':29500'\n", ["learner.meeting_address is ':29500'"]),
        ("[learner]\noffload = 'gpu'\n", ["learner.offload is 'gpu'", "'optimizer_and_parameters'"]),
        ("[learner]\nbetas = [0.9, 1.0]\n", ["learner.betas.1 is 1.0", "less than 1"]),
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
            "[learner]\nweights_endpoint = 'tcp://0.0.0.0:7003'\n",
            ["learner.weights_endpoint is 'tcp://0.0.0.0:7003'", "learner.advertised_weights_endpoint"],
        ),
        (
            "[rollout]\npeer_weights_endpoint = 'tcp://0.0.0.0:7004'\n",
            ["rollout.peer_weights_endpoint is 'tcp://0.0.0.0:7004'", "this host's own"],
        ),
        (
            "[learner]\nweights_group_backend = 'gloo'\n[security]\nkeys = 'keys'\n",
            ["learner.weights_group_backend is 'gloo'", "neither encrypted", "security.allow_plaintext = true"],
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


def test_the_papers_grpo_band_is_allowed_for_token_ratios(tmp_path: Path) -> None:
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
    assert load_settings(path, (), {}).run.directory.name == path.stem


def sections() -> Iterator[tuple[str, type[Section]]]:
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        yield name, field.annotation


def attribute_reads() -> set[tuple[str, str]]:
    """(what it is read from, attribute) of every attribute that the services read, outside the settings themselves."""
    reads = set()
    for path in (ROOT / "services").rglob("*.py"):
        if path.name == "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                base = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                reads.add((base.removeprefix("_"), node.attr))
    return reads


def test_every_setting_has_a_reader() -> None:
    reads = attribute_reads()
    unread = [
        f"{name}.{field}"
        for name, section in sections()
        for field in section.model_fields
        if not {(name, field), ("settings", field), ("section", field)} & reads
    ]
    assert unread == []


def test_every_setting_says_what_it_does() -> None:
    undocumented = [
        f"{name}.{field}"
        for name, section in sections()
        for field, info in section.model_fields.items()
        if not info.description
    ]
    assert undocumented == []


def test_the_librarys_objective_has_the_files_values(tmp_path: Path) -> None:
    text = '[objective]\nclip_range_growth = -0.5\nadaptive_clip_target = 0.15\nanchor = "proximal"\nmismatch_cap = 1.3\n'
    objective = objective_of(load_settings(written(tmp_path, text), (), {}).objective)
    assert objective == Objective(
        clip_range_growth=-0.5, adaptive_clip_target=0.15, anchor="proximal", mismatch_mode="truncate", mismatch_cap=1.3
    )
