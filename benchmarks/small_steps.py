"""How far small steps move a bfloat16 policy: python -m benchmarks.small_steps [--rates 1e-5 1e-6] [--steps 20]

SmolLM2-135M (`make models/smollm2/config.json`) takes Adam's steps on one fixed batch: right sums up, wrong ones down.
Masters are float32. Forward passes use them as they are (float32), rounded (middle: they begin as the rounded weights),
or rounded after ``spread``. The same gradient rule, the same data: only what rounds differs.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_services.learner.engine.spread_masters import spread

NUM_TASKS: Final = 16
KINDS: Final = ("float32", "middle", "spread")
END: Final = 2


class Batch:
    """Sums with their right answer, whose log-prob is to rise, and a wrong one, whose is to fall."""

    def __init__(self, directory: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tasks = [json.loads(line) for line in (directory / "tasks" / "train.jsonl").read_text().splitlines()][:NUM_TASKS]
        pairs = []
        for task in tasks:
            chat = [
                {"role": "system", "content": "Answer with the number only."},
                {"role": "user", "content": task["question"]},
            ]
            prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
            for wrong in (0, 1):
                answer = tokenizer(f"The answer is {int(task['answer']) + wrong}.")["input_ids"] + [END]
                pairs.append((prompt, answer))
        length = max(len(prompt) + len(answer) for prompt, answer in pairs)
        rows = [prompt + answer + [END] * (length - len(prompt) - len(answer)) for prompt, answer in pairs]
        self.ids_BT = torch.tensor(rows)
        place_T = torch.arange(length)
        ends_B1 = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in pairs])
        self.is_token_BT = place_T < ends_B1
        self.is_action_BT = self.is_token_BT & (place_T >= torch.tensor([[len(prompt)] for prompt, _ in pairs]))
        self.sign_B = torch.tensor([1.0, -1.0] * len(tasks))

    def logprobs(self, model: Any) -> Tensor:
        """Each answer's mean log-prob: float32 [B]."""
        logits_BTV = model(input_ids=self.ids_BT, attention_mask=self.is_token_BT.long()).logits[:, :-1].float()
        found_BT = logits_BTV.log_softmax(-1).gather(-1, self.ids_BT[:, 1:, None])[..., 0]
        mask_BT = self.is_action_BT[:, 1:]
        return (found_BT * mask_BT).sum(1) / mask_BT.sum(1)


def moved(start: Any, batch: Batch, kind: str, rate: float, steps: int) -> list[tuple[float, float]]:
    """Return after each step how far right answers moved up against wrong ones, in nats a token, and the changed weights."""
    model = copy.deepcopy(start) if kind == "float32" else copy.deepcopy(start).bfloat16()
    weights: list[nn.Parameter] = list(model.parameters())
    first = [weight.detach().clone() for weight in weights]
    masters = [weight.detach().float().clone() for weight in weights]
    if kind == "spread":
        for index, master in enumerate(masters):
            spread(master.view(-1), str(index), 0, 0)
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.no_grad():
        before_B = batch.logprobs(model)
    found = []
    for _ in range(steps):
        model.zero_grad()
        logprobs_B = batch.logprobs(model)
        (-(batch.sign_B * (logprobs_B - logprobs_B.detach()).exp()).mean()).backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
            up = float((batch.sign_B * (batch.logprobs(model) - before_B)).mean())
        changed = sum(int((weight != was).sum()) for weight, was in zip(weights, first, strict=True))
        found.append((up, changed / sum(weight.numel() for weight in weights)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-6], help="learning rates")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    if not (chosen.model / "config.json").is_file():
        parser.error(f"{chosen.model} has no model: make models/smollm2/config.json fetches one")
    torch.manual_seed(0)
    start, batch = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32), Batch(chosen.model)
    if chosen.steps < 4:
        parser.error(f"--steps {chosen.steps}: at least 4, which are shown in quarters")
    shown = sorted({1, chosen.steps // 4, chosen.steps // 2, chosen.steps})
    print("| learning rate | masters | " + " | ".join(f"step {step}" for step in shown) + " | weights changed |")
    print("|" + "---|" * (len(shown) + 3))
    for rate in chosen.rates:
        for kind in KINDS:
            found = moved(start, batch, kind, rate, chosen.steps)
            ups = " | ".join(f"{found[step - 1][0]:.4f}" for step in shown)
            print(f"| {rate:g} | {kind} | {ups} | {found[0][1]:.1%}, {found[-1][1]:.1%} |", flush=True)


if __name__ == "__main__":
    main()
