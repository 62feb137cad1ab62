"""What is known about each key: its type, range, default and meaning, who reads it, and the page that says so."""

from pathlib import Path
from textwrap import dedent

import pytest

from gspo_services.shared.settings.keys import all_keys, defining_classes, key_names, section_names, value_text
from gspo_services.shared.settings.readers import readers
from gspo_services.shared.settings.reference import reference
from gspo_services.shared.settings.sections import Settings

ROOT = Path(__file__).parents[5]


def test_the_page_of_settings_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference(ROOT), "run `make docs-settings` and commit docs/settings.md"


def test_every_setting_says_what_it_does() -> None:
    assert [key.name for key in all_keys().values() if not key.meaning.endswith((".", "?"))] == []


def test_every_setting_has_a_reader() -> None:
    assert {key for key, processes in readers(ROOT).items() if not processes} == set()


def test_the_librarys_meanings_and_ranges_are_the_sections() -> None:
    keys = all_keys()
    assert [each.__name__ for each in defining_classes("objective")] == ["ObjectiveSettings", "Objective"]
    assert keys["objective.eps_low"].meaning.startswith("A ratio below 1 - eps_low is clipped")
    assert keys["objective.eps_low"].type == "number, above 0, below 1"
    assert keys["objective.clip_range_growth"].type == "number"
    assert keys["objective.advantage"].meaning.startswith("Group-relative advantage")


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("run.seed", "integer, at least 0, below 2147483648", "0"),
        ("sampling.top_p", "number, above 0, at most 1", "1.0"),
        ("rollout.pause_mode", 'one of "retract", "in_place"', '"retract"'),
        ("rollout.server_args", "list of text", "[]"),
        ("learner.betas", "list of 2: number, at least 0, below 1", "[0.9, 0.95]"),
        ("learner.peak_tflops", "number, above 0, or not set", "not set"),
        ("learner.profile", "true or false", "false"),
        ("model.path", "path", '"models/tiny"'),
        ("environment.options", "table", "{}"),
    ],
)
def test_a_key_knows_its_type_its_range_and_its_default(key: str, kind: str, default: str) -> None:
    assert (all_keys()[key].type, value_text(all_keys()[key].default)) == (kind, default)


def test_keys_are_those_of_the_settings() -> None:
    plain = Settings().model_dump(mode="json")
    assert [f"{section}.{name}" for section in plain for name in plain[section]] == list(all_keys())
    assert key_names("batch") == ("group_size", "groups_per_batch", "mini_batches", "max_lag")
    assert key_names("batsh") == ()
    assert section_names()[0] == "run"


def tree(root: Path, **files: str) -> Path:
    """Sources below ``root``; a double underscore in a name is a slash."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root


def test_reads_are_found_through_parameters_aliases_attributes_fields_and_results(tmp_path: Path) -> None:
    tree(
        tmp_path,
        services__runtime__settings__sections="""
            class Settings:
                run: Run
                learner: Learner
                objective: ObjectiveSettings

                @model_validator
                def check(self):
                    self.run.max_restarts
            def load() -> Settings: ...
        """,
        services__broker__a="""
            def parameter(settings: "Settings"):
                settings.run.seed
            async def alias(settings: Settings | None):
                text, run = "", settings.run
                lambda: run.directory
                def another(run):
                    run.num_batches
        """,
        services__learner__b="""
            class Engine:
                def __init__(self, settings: EngineSettings):
                    self._settings = settings
                def go(self):
                    self._settings.learner.dtype
                def other(self, learner: Other):
                    learner.offload
            @dataclass
            class EngineSettings:
                learner: Learner
                def __post_init__(self):
                    self.learner.zero_stage
        """,
        services__runs__c="""
            def main():
                (load() if True else None).learner.betas
                settings.run.num_batches
        """,
    )
    found = {key: processes for key, processes in readers(tmp_path).items() if processes}
    assert found == {
        "run.seed": ("broker",),
        "run.directory": ("broker",),
        "learner.dtype": ("learner",),
        "learner.betas": ("commands",),
    }


def test_reads_in_shared_code_count_for_the_processes_that_use_it(tmp_path: Path) -> None:
    tree(
        tmp_path,
        gspo__loss="""
            def clip_range(objective: Objective):
                objective.eps_low
            def loss(objective: Objective):
                clip_range(objective)
                objective.eps_high
        """,
        services__runtime__net="""
            class Security:
                def load(cls, section: SecuritySection):
                    section.keys
            def unused(section: SecuritySection):
                section.metrics_host
        """,
        services__learner__trainer="from gspo.loss import loss\ndef train(): loss()",
        services__rollout__main="from gspo_services.shared.runtime import Security\nSecurity.load()",
        services__broker__main="from gspo_services.shared.runtime import Security\ndef main(): Security.load()",
    )
    found = {key: processes for key, processes in readers(tmp_path).items() if processes}
    assert found == {
        "objective.eps_low": ("learner",),
        "objective.eps_high": ("learner",),
        "security.keys": ("broker", "rollout"),
    }
