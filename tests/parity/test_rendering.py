"""Real chat templates of model families: found, bridged exactly, and answers read as they were written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gspo_services.rollout.rendering import Renderer, create_renderer
from tests.parity.chat_families import FAMILIES, make_model
from tests.support.engines import conversations

pytestmark = pytest.mark.parity
pytest.importorskip("renderers")

FOUND = {
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_vl": "qwen3-vl",
    "qwen2_5": "template",
    "glm4moe": "glm-4.5",
    "deepseekv3": "template",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "nemotron_3_5_lightning": "nemotron-3-ultra",
}
WITH_REASONING = (
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "nemotron_3_5_lightning",
)
ONE_CALL = ("llama3_1", "llama3_2")
SEEDS = range(30)
UNSEEN = "I think."
USER = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Renderer, Renderer]]:
    """Of each family the renderer that is found, and the one by its template alone."""
    made = {name: make_model(tmp_path_factory.mktemp(name), name) for name in FAMILIES}
    return {name: (create_renderer(tokenizer), create_renderer(tokenizer, "template")) for name, tokenizer in made.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_of_a_template_is_found(name: str, renderers: dict[str, tuple[Renderer, Renderer]]) -> None:
    assert renderers[name][0].name == FOUND[name]


def sampled_ids(renderer: Renderer, messages: list[dict[str, Any]], answer: dict[str, Any], tools: Any) -> list[int]:
    """What a model samples that gives ``answer`` as the template writes it after the prompt of ``messages``."""
    tokenizer = renderer._answer.tokenizer  # type: ignore[attr-defined]
    prompt = tokenizer.decode(renderer.prompt_ids(messages, tools))
    written = tokenizer.render([*messages, answer], tools=tools, add_generation_prompt=False)
    if written.startswith(prompt):
        rest = written.removeprefix(prompt)
    else:
        # The template opens the reasoning in the prompt, and leaves it out of what was answered.
        begin = prompt.removesuffix("<think>\n")
        assert written.startswith(begin)
        rest = f"{UNSEEN}\n</think>\n\n" + written.removeprefix(begin)
    ids: list[int] = tokenizer.encode(rest)
    end = next((index for index, token in enumerate(ids) if token in renderer.stop_ids), len(ids))
    return ids[: end + 1]


@pytest.mark.parametrize("which", ["found", "template"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_bridge_has_the_ids_of_the_template(
    name: str, which: str, renderers: dict[str, tuple[Renderer, Renderer]]
) -> None:
    renderer = renderers[name][which == "template"]
    exact = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        messages = conversations.beginning(rng)
        tools = conversations.tools(rng)
        calls = rng.randint(0, 1 if name in ONE_CALL else 2)
        answer = conversations.assistant(rng, calls=calls, reasoning=name in WITH_REASONING)
        new = conversations.results(rng, answer)
        prompt, sampled = renderer.prompt_ids(messages, tools), sampled_ids(renderer, messages, answer, tools)
        if name == "glm4moe":
            sampled.append(renderer.prompt_ids([*messages, answer, *new], tools)[len(prompt) + len(sampled)])
        if sampled[-1] not in renderer.stop_ids:
            sampled.append(renderer._answer.tokenizer.token_id(FAMILIES[name][3][0]))  # type: ignore[attr-defined]
        whole = renderer.prompt_ids([*messages, answer, *new], tools)
        bridge = renderer.bridge(prompt, sampled, new, tools)
        assert bridge is not None, seed
        # The template may leave out reasoning of the answer; from the stop token on it has nothing to leave out.
        assert whole[-len(bridge) - 1 :] == [sampled[-1], *bridge], seed
        if calls or name not in WITH_REASONING:
            exact += whole == [*prompt, *sampled, *bridge]
    print(f"{name} {which}: {exact} of {len(SEEDS)} are the whole conversation")


# The package opens the reasoning once more after results of tools, which DeepSeek's template does not: so "auto" takes the
# template, and the family can be named for its parser.
NAMED = {"deepseekv3": "deepseek-r1"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FOUND[name] != "template" or name in NAMED])
def test_answers_come_back_as_they_were_rendered(name: str, renderers: dict[str, tuple[Renderer, Renderer]]) -> None:
    renderer = renderers[name][0]
    if name in NAMED:
        renderer = create_renderer(renderer._answer.tokenizer, NAMED[name])  # type: ignore[attr-defined]
    for seed in SEEDS:
        rng = random.Random(seed)
        tools = conversations.tools(rng)
        calls = rng.randint(0, 1 if name in ONE_CALL else 2)
        answer = conversations.assistant(rng, calls=calls, reasoning=name in WITH_REASONING)
        if calls:
            for number, call in enumerate(answer["tool_calls"]):
                arguments = json.dumps({"q": rng.choice(["Zürich", 'a "b"', "two\nlines"]), "n": number})
                call["function"] = {"name": "tool_0", "arguments": arguments}
        prompt, sampled = renderer.prompt_ids([USER], tools), sampled_ids(renderer, [USER], answer, tools)
        parsed = renderer.parse(sampled, tools, prompt_ids=prompt)
        assert parsed.problem is None, (seed, parsed)
        assert [(call.name, json.loads(call.arguments_json)) for call in parsed.tool_calls] == [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.get("tool_calls", [])
        ], seed
        assert parsed.reasoning == (UNSEEN if name in NAMED else answer.get("reasoning_content")), seed
        if not (calls and name in ONE_CALL):
            assert parsed.content == (answer["content"] or "").strip(), seed
        stream = renderer.stream((), prompt)
        said = "".join(stream.feed([token]).content for token in sampled)
        assert parsed.content.startswith(said)
        assert said + stream.finish(parsed).content == parsed.content


@pytest.mark.parametrize("name", FAMILIES)
def test_cut_answers_and_odd_ids_are_taken(name: str, renderers: dict[str, tuple[Renderer, Renderer]]) -> None:
    renderer = renderers[name][0]
    tools = conversations.tools(random.Random(0))
    prompt = renderer.prompt_ids([USER], tools)
    for seed in SEEDS:
        rng = random.Random(seed)
        ids = [rng.randrange(700) for _ in range(10_000 if seed == 0 else rng.randint(0, 40))]
        parsed = renderer.parse(ids, tools, prompt_ids=prompt)
        parsed.content.encode()
        bridge = renderer.bridge(prompt, ids, [USER], tools)
        assert bridge is None or bridge
        stream = renderer.stream((), prompt)
        for token in ids:
            stream.feed([token])
        stream.finish(parsed)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_without_its_stop_token_is_closed(name: str, renderers: dict[str, tuple[Renderer, Renderer]]) -> None:
    renderer = renderers[name][0]
    answer = {"role": "assistant", "content": "It is fine."}
    prompt, sampled = renderer.prompt_ids([USER]), sampled_ids(renderer, [USER], answer, [])
    if sampled[-1] not in renderer.stop_ids:
        sampled.append(renderer._answer.tokenizer.token_id("<|user|>" if name == "glm4moe" else FAMILIES[name][3][0]))  # type: ignore[attr-defined]
    closed = renderer.bridge(prompt, sampled, [USER])
    cut = renderer.bridge(prompt, sampled[:-1], [USER])
    assert cut is not None
    assert closed is not None
    assert cut == [sampled[-1], *closed]
    tokenizer = renderer._answer.tokenizer  # type: ignore[attr-defined]
    assert tokenizer.decode(renderer.prompt_ids([USER, answer, USER])).endswith(tokenizer.decode(cut))


@pytest.mark.parametrize("name", WITH_REASONING)
def test_a_bridge_keeps_reasoning_that_the_template_would_drop(
    name: str, renderers: dict[str, tuple[Renderer, Renderer]]
) -> None:
    renderer = renderers[name][0]
    prompt = renderer.prompt_ids([USER])
    tokenizer = renderer._answer.tokenizer  # type: ignore[attr-defined]
    opened = tokenizer.decode(prompt).endswith("<think>\n")
    sampled = tokenizer.encode(("" if opened else "<think>\n") + "Hm.\n</think>\n\nFine.<|im_end|>")
    bridge = renderer.bridge(prompt, sampled, [USER])
    assert bridge is not None
    dropped = renderer.prompt_ids([USER, {"role": "assistant", "content": "Fine."}, USER])
    assert dropped[-len(bridge) :] == bridge
