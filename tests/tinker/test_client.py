"""Tinker's client 0.38.0, unmodified, trains and samples on this service."""

import json
import signal
from collections.abc import Iterator

import pytest

from tests.tinker.served import Service, said_by

pytestmark = [pytest.mark.tinker, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    served = Service(tmp_path_factory.mktemp("serve"))
    served.start()
    try:
        yield served
    finally:
        served.end()


def test_a_supervised_loss_falls_for_each_of_several_clients(service: Service) -> None:
    losses = service.result("supervised")["losses"]
    assert len(losses) == 3
    for each in losses.values():
        assert each[-1] < 0.6 * each[0]
    # Adapters begin as the base, of which each client's text is another.
    assert len({each[0] for each in losses.values()}) == 3


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_a_reward_rises(service: Service, loss: str) -> None:
    rewards = service.result("reinforced", loss)["rewards"]
    assert sum(rewards[:2]) / 2 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.5


def test_samples_are_those_of_the_weights_that_were_saved(service: Service) -> None:
    found = service.result("agreement")
    assert found["path"].endswith("/sampler_weights/five")
    assert found["most"] < 2e-5
    assert abs(found["moved"]) > 1e-2
    assert found["repeats"] == [True, True, True]
    assert len({tuple(each) for each in found["different"]}) == 5
    assert found["stopped"] == ["stop", True]
    assert found["reasons"] == ["length"] * 3
    assert found["likeliest_is_at_least"]


def test_a_call_that_fails_says_why_and_the_next_ones_go_on(service: Service) -> None:
    found = service.result("refusals")
    wanted = (
        "choose one by the argument loss_fn of: cross_entropy",
        "only finite values can be trained on",
        "weights is [1]; it must be [17]",
        "rank is 17; this service has ranks 1 to 16",
        "rank is 0; this service has ranks 1 to 16",
    )
    assert [text in told for text, told in zip(wanted, found["told"], strict=True)] == [True] * 5
    assert found["outputs"] == 1500
    assert found["step"]["learning_rate"] == 1e-4


def test_a_kill_costs_nothing_and_repeats_nothing(service: Service) -> None:
    """The same six steps, without and with a kill -9 in the third: the same losses and weights, bit for bit."""
    undisturbed = service.result("killed")
    client = service.client("killed")
    assert client.stdout is not None
    assert json.loads(client.stdout.readline()) == {"waits": True}
    service.end(signal.SIGKILL)
    service.start()
    assert said_by(client) == undisturbed
    assert undisturbed["ends"][0] != undisturbed["ends"][1]
    assert undisturbed["rank"] == 8
    assert not [line for line in service.lines if "other_answer" in line]
