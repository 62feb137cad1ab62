"""Which processes a run consists of."""

import pytest

from gspo_services.cli.run.processes import process_specs
from gspo_services.shared.placement import Placement, ProcessPlace
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings


def specs_of(*overrides: str) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    settings = load_settings(None, overrides, {})
    return {
        spec.name: (spec.module, spec.stop_order, spec.arguments)
        for spec in process_specs(settings, ("run.toml", "--set", "run.seed=1"))
    }


def test_a_run_is_a_broker_a_learner_and_its_rollouts_each_with_a_name_and_a_port() -> None:
    specs = specs_of("rollout.num_servers=2", "rollout.metrics_port=9200", "agent.port=7010")
    assert list(specs) == ["broker", "learner", "rollout-0", "rollout-1"]
    assert specs["broker"] == ("gspo_services.broker", 2, ("run.toml", "--set", "run.seed=1"))
    module, _, arguments = specs["rollout-1"]
    assert module == "gspo_services.rollout"
    assert arguments[:3] == ("run.toml", "--set", "run.seed=1")
    ports = ("--set", "rollout.metrics_port=9201", "--set", "agent.port=7011")
    assert arguments[3:] == (*ports, "--set", "rollout.linger=false", "--name", "rollout-1")


def test_rollouts_stop_first_and_the_broker_last() -> None:
    order = {name: stop_order for name, (_, stop_order, _) in specs_of().items()}
    assert order["rollout-0"] < order["learner"] < order["broker"]


def test_any_free_port_stays_any_free_port() -> None:
    assert "rollout.metrics_port=0" in specs_of("rollout.metrics_port=0")["rollout-1"][2]


def test_rollouts_get_more_than_their_drain_time_before_they_are_killed() -> None:
    specs = process_specs(load_settings(None, ["rollout.drain_s=40"], {}), ())
    assert all(spec.grace_s > 40 for spec in specs if spec.name.startswith("rollout"))


@pytest.mark.parametrize("override", ["rollout.server_url=http://127.0.0.1:30000", "rollout.server_port=30000"])
def test_two_rollouts_on_one_server_are_refused_with_what_to_do(override: str) -> None:
    with pytest.raises(ConfigurationError, match=r"30000.*use rollout.num_servers = 1"):
        specs_of(override, "rollout.num_servers=2")
    assert list(specs_of(override, "rollout.num_servers=1")) == ["broker", "learner", "rollout-0"]


def test_a_run_may_start_no_rollout_of_its_own() -> None:
    assert list(specs_of("rollout.num_servers=0")) == ["broker", "learner"]


def test_each_side_has_its_place_and_its_python_and_the_broker_none() -> None:
    overrides = ["rollout.num_servers=2", "learner.python=/opt/learner/bin/python", "rollout.python=/opt/sglang/bin/python"]
    places = [ProcessPlace(gpus=(name,)) for name in ("0", "1", "2")]
    placement = Placement(learner=places[0], rollouts=(places[1], places[2]))
    specs = process_specs(load_settings(None, overrides, {}), (), placement)
    assert [(spec.name, spec.place, spec.python) for spec in specs] == [
        ("broker", ProcessPlace(), ""),
        ("learner", places[0], "/opt/learner/bin/python"),
        ("rollout-0", places[1], "/opt/sglang/bin/python"),
        ("rollout-1", places[2], "/opt/sglang/bin/python"),
    ]
