"""Warnings and notes: what runs badly, what nothing uses, what an estimate says of lag."""

import json
import re
from typing import Any

import pytest

from gspo.model_files.text_model import TOWERS
from gspo_services.prepare.check import machine
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.speed import lag_span
from gspo_services.prepare.check.unused import evaluated_per_batch
from gspo_services.rollout.sglang import RoutedExperts
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.estimates import RunPace, Span
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Evaluation, EvaluationSet
from tests.support.checking.projects import LAPTOP, Project, gpus, write_weights
from tests.support.checking.shapes import QWEN3_06B, QWEN3_8B
from tests.support.policy.towers import CHECKPOINTS

BF16: dict[str, Any] = {
    "model.dtype": "bfloat16", "learner.dtype": "bfloat16", "learner.learning_rate": 1e-6, "sampling.max_turn_tokens": 512,
    "sampling.max_tokens": 1024, "learner.max_tokens_per_micro_batch": 4096, "learner.activation_checkpointing": True,
}  # fmt: skip


def by_check(findings: list[Finding], status: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.status == status}


@pytest.mark.parametrize(
    ("keys", "check", "way_out"),
    [
        ({"objective.anchor": "proximal", "objective.tis_cap": 1.1}, "tis cap", "tis_cap = 2.0"),
        ({"learner.learning_rate": 1e-6}, "learning rate", "2e-4"),
        ({"lora.rank": 8, "learner.learning_rate": 1e-6}, "learning rate", "ten times the rate for all weights is usual"),
        ({"lora.rank": 8, "learner.learning_rate": 0.1}, "learning rate", "ten times the rate for all weights is usual"),
        (
            {"lora.rank": 8, "learner.learning_rate": 1e-4, "schedule.learning_rate": {"steps": [[2, 0.1], [5, 1e-4]]}},
            "learning rate",
            "ten times the rate",
        ),
        ({"rollout.max_total_tokens": 400}, "KV cache", "raise rollout.max_total_tokens"),
        ({"learner.num_ranks": 16, "batch.mini_batches": 8}, "slow", "raise batch.groups_per_batch"),
        ({"schedule.temperature": {"steps": [[99999, 0.5]]}}, "schedule", "raise run.num_batches, or lower that batch"),
        ({"learner.dtype": "bfloat16"}, "types", 'model.dtype = "bfloat16"'),
        ({"batch.groups_per_batch": 64}, "train tasks", "batch.groups_per_batch"),
    ],
)
def test_what_runs_badly_is_a_warning_with_the_way_out(
    keys: dict[str, Any], check: str, way_out: str, project: Project
) -> None:
    project.keys |= keys
    found = by_check(project.findings(code=check == "train tasks"), "warn")
    assert way_out in found[check].way_out


@pytest.mark.parametrize(
    ("keys", "way_out"),
    [
        ({"sampling.max_tokens": 4096}, "lower sampling.max_tokens to at most 2048, or"),
        (
            {"sampling.max_tokens": 512, "schedule.max_tokens": {"steps": [[2, 4096]]}},
            "lower schedule.max_tokens to at most 2048",
        ),
    ],
)
def test_more_tokens_than_positions_are_a_fault(keys: dict[str, Any], way_out: str, project: Project) -> None:
    project.keys |= keys
    assert way_out in by_check(project.findings(code=False), "fail")["positions"].way_out


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        # SGLang has its configuration, and computes it with the class of OLMo 2.
        ("olmo3", "Olmo3ForCausalLM"),
    ],
)
def test_a_class_that_does_not_lie_under_its_own_name_is_found(kind: str, name: str, project: Project) -> None:
    project.configure_model(model_type=kind, architectures=[name])
    project.keys |= {"model.dtype": "bfloat16"}
    assert "architecture" not in by_check(project.findings(gpus("H100", 1), code=False), "fail")


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"])
def test_of_a_model_that_also_takes_images_the_text_model_is_checked(kind: str, project: Project) -> None:
    config = dict(CHECKPOINTS[kind])
    text = config.pop("text_config") | {"vocab_size": project.vocabulary}
    name = TOWERS[kind].architecture
    project.configure_tower(kind, text, **config)
    project.keys |= {"model.dtype": "bfloat16", "learner.dtype": "bfloat16"}
    findings = project.findings(gpus("H100", 4), code=False)
    assert by_check(findings, "fail") == {}
    found = next(each for each in findings if each.check == "architecture")
    assert f"{name}, its text model alone (images in a task are refused), " in found.text
    assert "unknown size" not in found.text


def test_positions_that_only_the_learner_stretches_are_a_warning(project: Project) -> None:
    config = json.loads((project.model / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
    (project.model / "config.json").write_text(json.dumps(config))
    project.keys |= {"sampling.max_tokens": 4096}
    found = by_check(project.findings(code=False), "warn")["positions"]
    assert found.text.endswith("the engine ends a sequence at the model's 2048 positions")
    assert "raise max_position_embeddings in config.json to 16384" in found.way_out


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"objective.anchor": "proximal", "objective.noise_z": 2.0, "objective.clip_range_growth": 0.5},
            "objective.clip_range_growth, objective.noise_z: for",
        ),
        ({"objective.tis_token_cap": 3.0}, 'tis_mode = "truncate_tokens", and it is "off"'),
        ({"objective.tis_cap": 1.2}, 'objective.tis_cap: for tis_mode = "truncate", and it is "off"'),
        ({"objective.kl_in": "loss"}, "objective.kl_coefficient is 0"),
        ({"objective.dppo_cap": 20.0}, 'objective.dppo_cap: for objective.surrogate = "dppo"'),
        ({"objective.tis_token_floor": 0.5}, 'objective.tis_token_floor: for tis_mode = "reject_tokens"'),
        ({"agent.workers": 3}, "agent.workers: no agent.function"),
        ({"agent.url": "http://127.0.0.1:1", "reward.workers": 3}, "reward.workers: an agent returns its reward itself"),
        ({"learner.rendezvous_address": "host:1"}, "learner.num_nodes is 1"),
        ({"learner.peak_tflops": 1.0}, "learner.profile is false"),
        ({"model.float32_head": True}, "model.dtype and learner.dtype are float32"),
        ({"lora.target_modules": ["experts"]}, "lora.target_modules: lora.rank is 0: all weights are trained"),
        ({"lora.max_loaded_loras": 4}, 'lora.max_loaded_loras: for lora.publish = "adapter"'),
        ({"evaluation.every_batches": 0}, "evaluation.num_tasks: evaluation.every_batches is 0"),
        ({"objective.overlong_penalty": 0.5}, "objective.overlong_buffer_tokens is not set"),
    ],
)
def test_a_setting_that_nothing_uses_is_noted(keys: dict[str, Any], text: str, project: Project) -> None:
    assert not [finding for finding in project.findings(code=False) if finding.check == "unused"]
    project.keys |= keys
    unused = [finding.text for finding in project.findings(code=False) if finding.check == "unused"]
    assert any(text in line for line in unused), unused


def test_a_schedule_is_shown_with_what_it_does_and_the_batch_at_which_it_grows_too_long(project: Project) -> None:
    assert "schedule" not in by_check(project.findings(code=False), "ok")
    project.keys |= {"run.num_batches": 10, "schedule.max_tokens": {"steps": [[3, 512], [7, 4096]]}}
    found = project.findings(code=False)
    assert by_check(found, "ok")["schedule"].text == "in 10 batches sampling.max_tokens 64 to 4096"
    text = by_check(found, "fail")["positions"].text
    assert text.startswith("sampling.max_tokens is 4096 (schedule.max_tokens, above that from batch 7); the model has 2048")


def test_a_cache_size_is_unused_on_a_gpu_only(project: Project) -> None:
    on_gpu = [finding.text for finding in project.findings(gpus("H100", 2), code=False) if finding.check == "unused"]
    assert on_gpu == ["rollout.max_total_tokens: on a GPU SGLang measures the room for its cache"]


def test_what_sglang_serves_on_a_cpu_only_is_a_failure_on_a_gpu(project: Project) -> None:
    assert "architecture" not in by_check(project.findings(code=False), "fail")
    finding = by_check(project.findings(gpus("H100", 1), code=False), "fail")["architecture"]
    assert "model.dtype is float32" in finding.text
    assert finding.way_out.startswith("set model.dtype and learner.dtype")
    project.keys |= BF16
    assert "head_dim is 16" in by_check(project.findings(gpus("H100", 1), code=False), "fail")["architecture"].text
    project.configure_model(head_dim=64)
    assert "architecture" not in by_check(project.findings(gpus("H100", 1), code=False), "fail")


def test_bfloat16_against_the_papers_clip_range_is_a_warning_until_it_is_steered(project: Project) -> None:
    project.keys |= BF16
    assert by_check(project.findings(gpus("H100", 2), code=False), "ok")["objective"].text.startswith("behaviour anchor")
    project.keys["objective.anchor"] = "proximal"
    assert "adaptive_clip_target" in by_check(project.findings(gpus("H100", 2), code=False), "warn")["objective"].way_out
    project.keys["objective.adaptive_clip_target"] = 0.15
    assert by_check(project.findings(gpus("H100", 2), code=False), "ok")["objective"].text.endswith("adaptive_clip_target")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"surrogate": "cispo"}, "token ratios, cispo, weights up to 5"),
        ({"surrogate": "sapo", "learning_rate_by_ess": True}, "sapo, temperatures 1 / 1.05, learning rate by effective"),
        ({"surrogate": "dppo"}, "dppo, probabilities within 0.15, ratios up to 20"),
        ({"surrogate": "m2po"}, "m2po, second moment up to 0.04"),
        (
            {"surrogate": "m2po_clip", "eps_low": 0.3, "eps_high": 0.5, "m2po_bound": 0.1},
            "m2po_clip, second moment up to 0.1 beyond eps 0.3 / 0.5",
        ),
        ({"surrogate": "vespo"}, "token ratios, vespo"),
        ({"surrogate": "gmpo", "eps_low": 0.33, "eps_high": 0.49}, "gmpo, eps 0.33 / 0.49"),
        (
            {"eps_low": 0.2, "eps_high": 0.27, "anchor": "proximal", "tis_mode": "reject_tokens"},
            "eps 0.2 / 0.27, tokens masked outside 0.5 to 2",
        ),
    ],
)
def test_the_rival_of_the_clip_is_shown_with_its_numbers(keys: dict[str, Any], text: str, project: Project) -> None:
    project.keys |= {f"objective.{key}": value for key, value in ({"ratio_unit": "token"} | keys).items()}
    assert text in by_check(project.findings(code=False), "ok")["objective"].text


def test_one_gpu_for_both_halves_is_told_which_share_the_server_may_take(project: Project) -> None:
    project.configure_model(**QWEN3_06B)
    write_weights(project.model / "model.safetensors", 596_049_920, "BF16")
    project.keys |= BF16
    findings = by_check(project.findings(gpus("H100", 1), code=False), "warn")
    share = findings["engine memory"].way_out
    assert share.startswith('rollout.server_args = ["--mem-fraction-static", "0.')
    project.keys["rollout.server_args"] = ["--mem-fraction-static", "0.5"]
    assert "engine memory" in by_check(project.findings(gpus("H100", 1), code=False), "ok")


def test_one_gpu_for_one_half_at_a_time_is_told_of_time_sharing_with_the_arithmetic(project: Project) -> None:
    project.configure_model(**QWEN3_8B)
    write_weights(project.model / "model.safetensors", 8_190_735_360, "BF16")
    # Adapters beside 15 GiB of weights, and 15 GiB for the engine: too much for 24 GB together, and no share would help.
    project.keys |= BF16 | {"learner.zero_stage": 2, "lora.rank": 16, "sampling.max_tokens": 1024}
    found = by_check(project.findings(gpus("4090", 1), code=False), "fail")["engine memory"]
    offered = (
        r"a GPU for each: .*; or run\.colocate = true, rollout\.num_servers = 1: time-shared, the learner takes "
        r"\d+ to \d+ GiB, then the engine \d+ to \d+ GiB, of 24 GiB, and 15 GiB more of the host's memory"
    )
    assert re.fullmatch(offered, found.way_out), found.way_out
    project.keys |= {"run.colocate": True, "rollout.num_servers": 1}
    findings = project.findings(gpus("4090", 1), code=False)
    told = {each.check: each for each in findings if each.check in ("learner memory", "engine memory")}
    assert {check: each.status for check, each in told.items()} == {"learner memory": "warn", "engine memory": "ok"}
    assert " while it has the device (weights 15 GiB, " in told["learner memory"].text
    assert "and 1.0 to 4.0 GiB that the server keeps); a 4090 has 24 GiB" in told["learner memory"].text
    assert "15 GiB offloaded" in next(each.text for each in findings if each.check == "host memory")


def test_time_sharing_is_not_offered_for_a_learner_that_does_not_fit_alone(project: Project) -> None:
    project.configure_model(**QWEN3_8B)
    write_weights(project.model / "model.safetensors", 8_190_735_360, "BF16")
    project.keys |= BF16
    assert "colocate" not in by_check(project.findings(gpus("H100", 1), code=False), "fail")["engine memory"].way_out


def test_where_each_process_would_be_is_said_before_a_gpu_is_booked(project: Project) -> None:
    project.keys |= {"learner.num_ranks": 2, "rollout.num_servers": 2}
    (finding,) = [each for each in project.findings(gpus("H100", 4), code=False) if each.check == "placement"]
    assert (finding.status, finding.text) == ("note", "learner: GPUs 0, 1; rollout-0: GPU 2; rollout-1: GPU 3")
    project.keys["rollout.num_servers"] = 3
    (finding,) = [each for each in project.findings(gpus("H100", 4), code=False) if each.check == "placement"]
    assert finding.status == "fail"
    assert finding.way_out.startswith("lower learner.num_ranks or rollout.num_servers")


def test_hardware_that_nobody_named_gets_needs_and_no_verdict(project: Project) -> None:
    project.configure_model(**QWEN3_8B)
    (project.model / "model.safetensors").unlink()
    write_weights(project.model / "model.safetensors", 8_190_735_360, "BF16")
    project.keys |= BF16 | {"learner.num_ranks": 4, "learner.zero_stage": 3}
    notes = by_check(project.findings(LAPTOP, code=False, elsewhere=True), "note")
    # 18 bytes a parameter over four ranks, of which activations take some.
    assert "weights 3.8 GiB, gradients 7.6 GiB, optimizer 23 GiB" in notes["learner memory"].text
    assert "--gpu NAME --gpus N" in notes["learner memory"].text
    assert "144 KiB of cache a token" in notes["engine memory"].text


def test_tasks_of_both_splits_are_noticed(project: Project) -> None:
    project.write_rows("eval.jsonl", [{"question": "3+1=", "answer": "4"}, {"question": "99+1=", "answer": "100"}])
    found = by_check(project.findings(), "warn")["eval tasks"]
    assert found.text == "1 of 2 are training tasks, too"


def test_a_task_of_both_splits_is_noticed_although_it_stands_in_two_files(project: Project) -> None:
    project.write_rows("eval.jsonl", [{"question": "3+1=", "answer": "4"}, {"question": "99+1=", "answer": "100"}])
    kept = {"train_path", "eval_path", "system_prompt"}
    options = {key: value for key, value in project.keys["environment.options"].items() if key in kept}
    project.keys |= {"environment.name": "math", "environment.options": {**options, "kind": "integer"}}
    assert by_check(project.findings(), "warn")["eval tasks"].text == "1 of 2 are training tasks, too"


def test_a_prompt_that_leaves_little_room_is_a_warning(project: Project) -> None:
    question = "One pen costs 7 coins. What do 9 cost?"
    tokens = len(ChatTokenizer(project.model).prompt_ids([{"role": "user", "content": question}]))
    sums = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    project.write_rows("train.jsonl", [*sums, {"question": question, "answer": "63"}])
    project.keys |= {"sampling.max_tokens": tokens + 5}
    found = next(finding for finding in project.findings() if finding.check == "train prompts")
    assert (found.status, "an answer has 5 tokens of" in found.text) == ("warn", True)
    assert found.way_out == f"raise sampling.max_tokens to {tokens + 8}"


def pace(generation: Span, training: Span, episode: Span) -> RunPace:
    return RunPace(sampled=Span(1, 1), trained=Span(1, 1), generation_s=generation, training_s=training, episode_s=episode)


def test_lag_counts_the_versions_that_pass_while_one_is_served_and_an_answer_sampled() -> None:
    lag = lag_span(pace(Span(10, 20), Span(5, 40), Span(10, 20)), Span(20, 80))
    # A batch takes 10 to 40 s. The answer takes 10/10 or 20/40 of it; the version at least 20/40, at most 80/10.
    assert (lag.low, lag.high) == (0.5 + 0.5, 1.0 + 8.0)


def test_each_evaluation_set_is_opened_and_counted(project: Project) -> None:
    project.write_rows("few.jsonl", [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)])
    few = {"options": {"eval_path": str(project.folder / "few.jsonl")}, "samples": 4, "metrics": ["pass@2"]}
    project.keys |= {"evaluation.sets": {"few": few, "rated": {**few, "metrics": ["elo"]}}}
    found = {finding.check: finding for finding in project.findings()}
    assert (found["set few"].status, found["set few"].text) == ("ok", "3 tasks, 4 samples of each: pass@2")
    assert (found["set rated"].status, "has no elo" in found["set rated"].text) == ("fail", True)
    assert "eval tasks" not in found


def test_what_evaluations_sample_is_counted_over_all_sets() -> None:
    one = Evaluation(every_batches=4, num_tasks=20)
    sets = {
        "a": EvaluationSet(num_tasks=10, samples=8),
        "b": EvaluationSet(every_batches=0),
        "c": EvaluationSet(every_batches=1),
    }
    assert evaluated_per_batch(one) == 5.0
    assert evaluated_per_batch(Evaluation(every_batches=4, num_tasks=20, sets=sets)) == 10 * 8 / 4 + 20


def test_a_driver_that_is_too_old_is_a_failure(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise ConfigurationError("the GPUs' driver is 535.104.05, and torch needs 580 or newer; update the driver")

    monkeypatch.setattr(machine, "require_driver", too_old)
    found = by_check(project.findings(LAPTOP, code=False), "fail")["driver"]
    assert found.text.endswith("needs 580 or newer")
    assert found.way_out == "update the driver"
    assert "driver" not in by_check(project.findings(gpus("H100", 8), code=False), "fail"), "of another machine"


def test_the_bytes_of_replayed_experts_are_named(project: Project) -> None:
    assert "experts" not in by_check(project.findings(code=False), "note")
    project.keys |= {"objective.routing_replay": True, "objective.routing_replay_from": "engine", "batch.group_size": 8}
    text = by_check(project.findings(code=False), "note")["experts"].text
    assert "4 bytes a sampled token on the wire and in the ledger, 0.0156 MiB a batch at most" in text  # 64 answers of 64
    project.configure_model(num_experts=256, num_experts_per_tok=4)
    assert "16 bytes a sampled token" in by_check(project.findings(code=False), "note")["experts"].text


def test_experts_that_no_rollout_would_take_from_its_engine_are_a_failure(project: Project) -> None:
    text = "2 of 8 experts in 600 layers take 1200 bytes a token, 1024 allowed (MAX_EXPERT_BYTES)"
    project.keys |= {"objective.routing_replay": True, "objective.routing_replay_from": "engine"}
    project.configure_model(num_hidden_layers=600)
    (found,) = [each for each in project.findings(code=False) if each.check == "experts"]
    assert (found.status, found.text) == ("fail", text)
    assert found.way_out == 'set objective.routing_replay_from = "learner"'
    with pytest.raises(ValueError, match=re.escape(text)):
        RoutedExperts.of(json.loads((project.model / "config.json").read_text()))


def test_kernels_for_another_cuda_are_a_failure_of_this_python_s_servers(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another() -> None:
        raise ConfigurationError(
            "sglang-kernel 0.4.10 is built for CUDA 12, and torch for CUDA 13.0; install both for one CUDA"
        )

    monkeypatch.setattr(machine, "require_kernels", another)
    assert by_check(project.findings(LAPTOP, code=False), "fail")["kernels"].way_out == "install both for one CUDA"
    project.keys["rollout.server_url"] = "http://127.0.0.1:30000"
    assert "kernels" not in by_check(project.findings(LAPTOP, code=False), "fail"), "of another Python"
