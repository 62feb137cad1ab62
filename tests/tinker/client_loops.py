"""Loops of a client, as its users write them, with Tinker's client and nothing of ours. Results are a line of JSON.

python client_loops.py LOOP
"""

import json
import random
import sys
from typing import Any

import tinker
from tinker import types

MODEL = "Qwen/Qwen3-8B-Base"
TEXT = "Hello world, 1 2 3"


def say(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def opened(seed: int, rank: int = 8) -> tuple[tinker.ServiceClient, Any, Any]:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result()
    return service, training, training.get_tokenizer()


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Of a whole sequence: each token but the first is a target."""
    model_input = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


def supervised() -> None:
    """Texts are learnt; three clients at once, each its own, by adapters of different ranks."""
    rows = {}
    for client, rank in enumerate((2, 8, 16)):
        _, training, tokenizer = opened(client, rank)
        tokens = tokenizer.encode(f"{TEXT} {client}")
        rows[client] = (training, [datum(tokens, weights=[1.0] * (len(tokens) - 1))] * 4, [])
    for _ in range(12):
        # Both are sent before either has answered, as recipes do.
        adam = types.AdamParams(learning_rate=4e-3)
        sent = [
            (client, training.forward_backward(data, "cross_entropy"), training.optim_step(adam))
            for client, (training, data, _) in rows.items()
        ]
        for client, forward, step in sent:
            rows[client][2].append(forward.result().metrics["loss:sum"])
            step.result()
    say(losses={client: losses for client, (_, _, losses) in rows.items()})


def reinforced(loss: str = "importance_sampling") -> None:
    """Sevens are rewarded; each group's advantages are centred, as rl_loop does it."""
    _, training, tokenizer = opened(0, 16)
    prompt = tokenizer.encode(TEXT)
    rewards = []
    for step in range(15):
        sampling = training.save_weights_and_get_sampling_client().result()
        parameters = types.SamplingParams(max_tokens=12, temperature=1.0, seed=1000 * step, stop=[])
        answer = sampling.sample(types.ModelInput.from_ints(prompt), 32, parameters).result()
        found = [tokenizer.decode(s.tokens).count("7") / 12 for s in answer.sequences]
        mean = sum(found) / len(found)
        rewards.append(mean)
        data = []
        for sequence, reward in zip(answer.sequences, found, strict=True):
            before, sampled = [0.0] * (len(prompt) - 1), len(sequence.tokens)
            inputs = {"logprobs": before + list(sequence.logprobs), "advantages": before + [reward - mean] * sampled}
            data.append(datum(prompt + list(sequence.tokens), **inputs))
        # The second time the ratios are no longer 1.
        for _ in range(2 if loss == "ppo" else 1):
            training.forward_backward(data, loss).result()
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    say(rewards=rewards)


def agreement() -> None:
    """The engine that samples and the one that trains have the same log-probs of the same weights."""
    service, training, tokenizer = opened(3)
    tokens = tokenizer.encode(TEXT)
    weights = {"weights": [1.0] * (len(tokens) - 1)}
    for _ in range(5):
        training.forward_backward([datum(tokens, **weights)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    base = service.create_sampling_client(base_model=MODEL)
    path = training.save_weights_for_sampler("five").result().path
    sampling = service.create_sampling_client(model_path=path)

    def forward(sequence: list[int]) -> list[float]:
        given = {"weights": [1.0] * (len(sequence) - 1)}
        return training.forward([datum(sequence, **given)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

    prompt = types.ModelInput.from_ints(tokens)
    parameters = types.SamplingParams(max_tokens=24, seed=5, stop=[])
    scored = sampling.sample(prompt, 3, parameters, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    again = sampling.sample(prompt, 3, parameters).result()
    others = sampling.sample(prompt, 2, types.SamplingParams(max_tokens=24, stop=[])).result()
    # A text that is surely there: what the same seed gave before, from its fourth character on.
    whole = tokenizer.decode(scored.sequences[0].tokens)
    stop = next(text for text in (whole[n : n + 2] for n in range(3, 20)) if "\ufffd" not in text)
    ended = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=24, seed=5, stop=stop)).result().sequences[0]
    differences = [a - b for a, b in zip(scored.prompt_logprobs[1:], forward(tokens), strict=True)]
    for sequence in scored.sequences:
        whole_sequence = tokens + list(sequence.tokens)
        own = forward(whole_sequence)[-len(sequence.tokens) :]
        differences += [a - b for a, b in zip(sequence.logprobs, own, strict=True)]
    best = [max(entry, key=lambda each: each[1]) for entry in scored.topk_prompt_logprobs[1:]]
    say(
        path=path,
        most=max(map(abs, differences)),
        repeats=[s.tokens == t.tokens for s, t in zip(scored.sequences, again.sequences, strict=True)],
        different=[list(s.tokens) for s in (*scored.sequences, *others.sequences)],
        stopped=[ended.stop_reason, tokenizer.decode(ended.tokens).endswith(stop)],
        reasons=[s.stop_reason for s in scored.sequences],
        moved=base.compute_logprobs(prompt).result()[1] - scored.prompt_logprobs[1],
        likeliest_is_at_least=all(b[1] >= a - 1e-6 for a, b in zip(scored.prompt_logprobs[1:], best, strict=True)),
    )


def refusals() -> None:
    """What fails is one call: the next ones go on."""
    service, training, tokenizer = opened(4)
    tokens = tokenizer.encode(TEXT)
    one = {"weights": [1.0] * (len(tokens) - 1)}
    told = []
    for loss, data in (
        ("stable_reinforce", [datum(tokens, logprobs=one["weights"], advantages=one["weights"])]),
        ("cross_entropy", [datum(tokens, weights=[float("nan")] * (len(tokens) - 1))]),
        ("cross_entropy", [datum(tokens, weights=[1.0])]),
    ):
        try:
            training.forward_backward(data, loss).result()
        except tinker.RequestFailedError as error:
            told.append(str(error))
    for rank in (17, 0):
        try:
            service.create_lora_training_client(base_model=MODEL, rank=rank).result()
        except tinker.RequestFailedError as error:
            told.append(str(error))
    many = training.forward_backward([datum(tokens, **one)] * 1500, "cross_entropy").result()
    step = training.optim_step(types.AdamParams()).result()
    say(told=told, outputs=len(many.loss_fn_outputs), loss=many.metrics["loss:sum"], step=step.metrics)


def killed() -> None:
    """Six steps of a model and its state loaded into another; says when it waits for the third step, and the result."""
    service, training, tokenizer = opened(6)
    # Its own: the client draws its pauses from the common one.
    drawn = random.Random(6)
    tokens, losses = tokenizer.encode(TEXT), []
    state = ""
    for step in range(6):
        data = [datum(drawn.sample(tokens, 6), weights=[1.0] * 5) for _ in range(4)]
        forward = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(types.AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=100.0))
        if step == 2:
            say(waits=True)
        losses.append(forward.result().metrics["loss:sum"])
        update.result()
        if step == 3:
            state = training.save_state("four").result().path
    other = service.create_training_client_from_state_with_optimizer(state).result()
    data = [datum(tokens, weights=[1.0] * (len(tokens) - 1))]
    ends = [each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (training, other)]
    say(losses=losses, ends=ends, rank=other.get_info().lora_rank)


if __name__ == "__main__":
    {each.__name__: each for each in (supervised, reinforced, agreement, refusals, killed)}[sys.argv[1]](*sys.argv[2:])
