"""Nothing else that is installed here brings packages of our names."""

from importlib.metadata import packages_distributions

import pytest


@pytest.mark.parametrize("package", ["gspo", "gspo_protocol", "gspo_services"])
def test_the_package_belongs_to_this_distribution_alone(package: str) -> None:
    assert set(packages_distributions()[package]) == {"gspo"}
