"""Every option of the installed SGLang is known by what it does to a policy, and every parameter of a request is stated."""

import argparse
from collections.abc import Sequence

import pytest

from gspo_services.rollout.sglang.generation import NEUTRAL
from gspo_services.shared.settings.server_options import HARMLESS, KNOWN, RANKS, REFUSED_OPTIONS, UNTRIED, objection, untried

_OWN = {"max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "stream_interval"}
_OF_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
_MADE = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"}
"""What SGLang fills in."""


def test_each_option_of_the_installed_sglang_is_known() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    assert names == KNOWN
    assert len(names) == len(REFUSED_OPTIONS) + len(HARMLESS) + len(UNTRIED) + len(RANKS)


def test_each_parameter_of_a_request_is_stated_with_sglangs_own_neutral_value() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    assert set(SamplingParams.__struct_fields__) == NEUTRAL.keys() | _OWN | _OF_TEXT | _MADE
    untouched = SamplingParams()
    assert {name: getattr(untouched, name) for name in NEUTRAL} == NEUTRAL


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preferred-sampling-params", '{"min_p": 0.1}'], "--preferred-sampling-params: it changes what is sampled"),
        (["--preferred", '{"min_p": 0.1}'], "--preferred-sampling-params: "),
        (['--json-model-override-args={"rope_theta": 1}'], "train another one"),
        (["--log-level", "info", "--disaggregation-mode", "decode"], "use whole servers"),
        (["--chat-template", "chatml"], "rendered by the rollout"),
        (["--load-format=dummy"], "train another one"),
        (["--load-format", "gguf"], "no update could be verified"),
        (["--tp", "2"], "--tp-size 2: use rollout.tensor_parallel"),
        (["--lora-paths", "a=b"], "[lora]"),
        (["--config", "a.yaml"], "write its options in server_args"),
        (["--tp-size", "1", "--load-format", "auto", "--mem-fraction-static", "0.8"], ""),
    ],
)
def test_options_that_change_the_policy_are_refused_also_by_the_beginning_of_their_names(
    arguments: Sequence[str], expected: str
) -> None:
    found = objection(arguments)
    assert expected in found if expected else found == ""


def test_options_that_nobody_has_tried_are_named() -> None:
    assert untried(["--log-level", "info", "--cpu-offload-gb=3", "--new-one"]) == ["--cpu-offload-gb", "--new-one"]
