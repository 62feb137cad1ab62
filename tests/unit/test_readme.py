"""What the README shows works as shown."""

import tomllib

from gspo_services.shared.settings.sections import Settings
from tests.support.readme import block


def test_the_settings_shown_for_your_own_model_are_accepted() -> None:
    settings = Settings.model_validate(tomllib.loads(block("Your model and your GPUs", "[model]")))
    assert settings.learner.num_ranks == 8
    assert settings.environment.options["prompt_column"] == "question"
