"""The section of agents: what contradicts itself is refused, with the way out."""

import pytest

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings

FUNCTION = "agent.function=mine:solve"
OTHERS = ("0.0.0.0", "10.0.0.7", "::")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((FUNCTION, 'agent.command=["node", "agent.js"]'), "agent.function and agent.command are both set"),
        ((FUNCTION, "agent.url=http://127.0.0.1:8000"), "agent.function and agent.url are both set"),
        (("agent.function=solve",), "agent.function is 'solve': expected"),
        (("agent.url=127.0.0.1:8000",), "agent.url is '127.0.0.1:8000': it must begin with http"),
        (
            ("agent.url=http://127.0.0.1:8000", "agent.python=python3"),
            "agent.python is 'python3', which is for",
        ),
        ((FUNCTION, "agent.deadline_s=900"), "broker.idle_lease_s is 900 but agent.deadline_s is 900"),
        ((FUNCTION, "agent.on_replay=again"), "agent.on_replay is 'again'"),
        ((FUNCTION, "agent.weights={right = 'much'}"), "agent.weights.right is 'much'"),
        ((FUNCTION, "agent.workers=0"), "agent.workers is 0"),
        ((FUNCTION, "agent.functions=mine:solve"), "agent.functions: unknown key"),
        *(((FUNCTION, f'agent.host="{host}"'), f"agent.host is '{host}': other hosts can reach that") for host in OTHERS),
    ],
)
def test_a_wrong_agent_is_refused_with_the_way_out(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, overrides, {})
    assert words in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_host_needs_no_keys(host: str) -> None:
    assert load_settings(None, (FUNCTION, f'agent.host="{host}"'), {}).agent.is_used


@pytest.mark.parametrize("host", OTHERS)
def test_other_hosts_may_reach_the_endpoint_of_a_run_that_says_so(host: str) -> None:
    load_settings(None, (FUNCTION, f'agent.host="{host}"', "security.allow_plaintext=true"), {})
    # Without an agent there is no endpoint.
    assert not load_settings(None, (f'agent.host="{host}"',), {}).agent.is_used
