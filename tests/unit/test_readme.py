"""What the README shows works as shown."""

import tomllib

from gspo_services.shared.settings.sections import Settings
from tests.support.pages import ROOT, shown


def test_the_settings_shown_for_your_own_model_are_accepted() -> None:
    settings = Settings.model_validate(tomllib.loads(shown("README.md", "[model]")))
    assert settings.learner.num_ranks == 8
    assert settings.environment.options["prompt_column"] == "question"


def test_it_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
