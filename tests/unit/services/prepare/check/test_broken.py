"""Configurations that are broken in one place: each is found, with the way out, and nothing else is."""

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.prepare.check.findings import Finding
from gspo_services.shared.settings import load_settings, write_run_settings
from tests.support.checking.projects import LAPTOP, Project, gpus, write_weights
from tests.support.checking.shapes import QWEN3_8B, QWEN3_30B
from tests.support.policy.towers import CHECKPOINTS

Break = Callable[[Project], None]


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "fail"]


def the_failure(findings: list[Finding]) -> Finding:
    (found,) = failures(findings)
    return found


def test_a_sound_project_has_no_complaint(project: Project) -> None:
    findings = project.findings()
    assert [finding for finding in findings if finding.status in ("warn", "fail")] == []
    checks = {finding.check for finding in findings}
    assert checks >= {
        "architecture", "weights", "ranks", "objective", "learning rate", "tokenizer", "chat template", "train tasks",
        "eval tasks", "train prompts", "episode", "ports", "run directory", "disk", "memory", "KV cache", "speed", "time",
        "lag",
    }  # fmt: skip
    (episode,) = [finding for finding in findings if finding.check == "episode"]
    # An echo of "0+1=" has a 1 in it: the reward function itself has said so.
    assert episode.text == "an echo of task 0 gets 2 (brief 1, right 1) in 1 turns"


def no_config(project: Project) -> None:
    (project.model / "config.json").unlink()


def config_that_is_no_json(project: Project) -> None:
    (project.model / "config.json").write_text("{")


def shared_keys(project: Project) -> None:
    project.configure_model(num_kv_shared_layers=4)


def mixed_layers(project: Project) -> None:
    project.configure_model(layer_types=["full_attention", "chunked_attention"])


def a_window_that_sglang_ignores(project: Project) -> None:
    project.configure_model(layer_types=["full_attention", "sliding_attention"], sliding_window=16)


def a_kernel_for_gpus(project: Project) -> None:
    project.configure_model(model_type="gemma2")


def an_encoder(project: Project) -> None:
    project.configure_model(architectures=["BertForMaskedLM"])


def an_unknown_class(project: Project) -> None:
    project.configure_model(architectures=["NobodysForCausalLM"])


def a_state_in_another_way(project: Project) -> None:
    project.configure_model(model_type="nemotron_h", architectures=["NemotronHForCausalLM"], ssm_state_size=16)


def quantised(project: Project) -> None:
    project.configure_model(quantization_config={"quant_method": "fp8"})


def quantised_in_another_way(project: Project) -> None:
    project.configure_model(quantization_config={"quant_method": "gptq"})


def an_unknown_router(project: Project) -> None:
    project.configure_model(scoring_func="tanh")


def endless_layers(project: Project) -> None:
    project.configure_model(num_hidden_layers=2**39)


def code_of_its_own(project: Project) -> None:
    project.configure_model(architectures=["NobodysForCausalLM"], auto_map={"AutoModel": "modeling.Model"})


def no_weights(project: Project) -> None:
    (project.model / "model.safetensors").unlink()


def pickled_weights(project: Project) -> None:
    (project.model / "model.safetensors").rename(project.model / "pytorch_model.bin")


def images(project: Project) -> None:
    project.configure_model(architectures=["Qwen3VLForConditionalGeneration"], vision_config={})


def chunks_in_a_text_model(project: Project) -> None:
    text = {"attention_chunk_size": 8192}
    project.configure_model(architectures=["Llama4ForConditionalGeneration"], text_config=text)


def a_text_model_that_is_not_trained(project: Project) -> None:
    project.configure_model(model_type="mistral3", text_config={"model_type": "mistral4"})


def adapters_of_a_text_tower(project: Project) -> None:
    text = CHECKPOINTS["mistral3"]["text_config"] | {"vocab_size": project.vocabulary, "max_position_embeddings": 2048}
    project.configure_tower("mistral3", text)
    project.keys |= {"lora.rank": 8, "learner.learning_rate": 2e-3, "lora.publish": "adapter"}


def an_old_decoder(project: Project) -> None:
    project.configure_model(architectures=["GPT2LMHeadModel"])


def a_name_of_the_hub(project: Project) -> None:
    project.keys["model.path"] = "Qwen/Qwen3-0.6B"


def weights_cut_off(project: Project) -> None:
    os.truncate(project.model / "model.safetensors", 5000)


def a_shard_is_missing(project: Project) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (project.model / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_of_another_model(project: Project) -> None:
    write_weights(project.model / "model.safetensors", 1000)


def experts_that_do_not_divide(project: Project) -> None:
    project.keys |= {"learner.num_ranks": 3, "learner.expert_parallel": 3}


def adapters_of_layers_that_are_not_there(project: Project) -> None:
    project.keys |= {"lora.rank": 8, "learner.learning_rate": 2e-3, "lora.target_modules": ["attention", "mlp"]}


def adapters_of_shared_experts(project: Project) -> None:
    project.keys |= {
        "lora.rank": 8,
        "learner.learning_rate": 2e-3,
        "lora.target_modules": ["experts"],
        "learner.num_ranks": 2,
    }
    project.keys |= {"learner.expert_parallel": 2, "learner.zero_stage": 3}


@pytest.mark.parametrize(
    ("wrong", "check", "text", "way_out"),
    [
        (no_config, "model", "no config.json there", "gspo model tiny"),
        (config_that_is_no_json, "model", "cannot be read", "again"),
        (shared_keys, "architecture", "num_kv_shared_layers", "another model"),
        (mixed_layers, "architecture", "chunked_attention", "full_attention, linear_attention, sliding_attention"),
        (
            a_window_that_sglang_ignores,
            "architecture",
            "with a window of 16 tokens",
            "lower sampling.max_tokens to at most 16",
        ),
        (a_kernel_for_gpus, "architecture", "gemma2 on a CPU", "use a GPU"),
        (an_encoder, "architecture", "BertForMaskedLM is not a causal language model", "ForCausalLM"),
        (a_state_in_another_way, "architecture", "state from token to token (ssm_state_size)", "qwen3_next are trained"),
        (images, "architecture", "takes images", "whose text model is trained here: Gemma3ForConditionalGeneration"),
        (chunks_in_a_text_model, "architecture", "chunked_attention", "full_attention, linear_attention, sliding"),
        (a_text_model_that_is_not_trained, "model", "text_config.model_type is mistral4", "again"),
        (adapters_of_a_text_tower, "ranks", "lora.publish is 'adapter'", 'set lora.publish = "merged"'),
        (an_old_decoder, "architecture", "rotary positions", "a table of families"),
        (
            a_name_of_the_hub,
            "model",
            "model.path is Qwen/Qwen3-0.6B",
            "`hf download Qwen/Qwen3-0.6B --local-dir models/Qw",
        ),
        (an_unknown_class, "architecture", "NobodysForCausalLM", "both know"),
        (quantised, "architecture", "quantised", "gspo model dequantise DIR NEW"),
        (quantised_in_another_way, "architecture", "quantised (quantization_config: gptq)", "unquantised"),
        (an_unknown_router, "architecture", "scoring_func is tanh", "correct config.json"),
        (endless_layers, "architecture", "num_hidden_layers is 549755813888: at most 10,000", "correct config.json"),
        (code_of_its_own, "architecture", "NobodysForCausalLM: no class of", "both know"),
        (no_weights, "weights", "has no weights", "save_pretrained"),
        (pickled_weights, "weights", "has its weights in pytorch_model.bin", "save_pretrained('"),
        (weights_cut_off, "weights", "cut off", "again"),
        (a_shard_is_missing, "weights", "model-2.safetensors", "again"),
        (weights_of_another_model, "weights", "1,000 elements", "config.json and weights"),
        (experts_that_do_not_divide, "ranks", "does not divide", "use one of 1, 2, 4, 8"),
        (adapters_of_layers_that_are_not_there, "ranks", "names 'mlp' and a qwen3_moe", "attention, experts"),
        (adapters_of_shared_experts, "ranks", "'experts' and expert_parallel is 2", "use expert_parallel = 1"),
    ],
)
def test_a_broken_model_is_found(wrong: Break, check: str, text: str, way_out: str, project: Project) -> None:
    wrong(project)
    found = the_failure(project.findings(code=False))
    assert found.check == check
    assert text in found.text
    assert way_out in found.way_out


def no_tokenizer(project: Project) -> None:
    (project.model / "tokenizer.json").unlink()


def tokenizer_of_another_model(project: Project) -> None:
    config = json.loads((project.model / "config.json").read_text())
    (project.model / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    (project.model / "model.safetensors").unlink()
    write_weights(project.model / "model.safetensors", 256_384 + 2 * 64 * (20 - 264))


def no_stop_token(project: Project) -> None:
    path = project.model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))


def template_without_the_answer(project: Project) -> None:
    template = "{% for m in messages %}{{ '<|user|>' + (m.content if m.role == 'user' else '') }}{% endfor %}<|assistant|>"
    (project.model / "chat_template.jinja").write_text(template)


def template_that_opens_nothing(project: Project) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    (project.model / "chat_template.jinja").write_text(template)


def template_with_an_error(project: Project) -> None:
    (project.model / "chat_template.jinja").write_text("{% for %}")


def template_that_refuses(project: Project) -> None:
    (project.model / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")


def a_variable_of_the_renderer(project: Project) -> None:
    project.keys["model.template_arguments"] = {"messages": []}


def no_file(project: Project) -> None:
    project.option(train_path=str(project.folder / "nowhere.jsonl"))


def no_column(project: Project) -> None:
    project.option(prompt_column="prompt")


def bytes_that_are_no_text(project: Project) -> None:
    (project.folder / "train.jsonl").write_bytes(b'{"question": "\xff", "answer": "1"}\n')


def no_eval_split(project: Project) -> None:
    project.option(eval_path="")


def an_unknown_option(project: Project) -> None:
    project.option(trian_path="x")


def no_such_environment(project: Project) -> None:
    project.keys["environment.name"] = "nowhere.to_be_found:Environment"


def prompts_that_are_too_long(project: Project) -> None:
    project.write_rows(
        "train.jsonl",
        [*({"question": f"{n}+1=", "answer": "2"} for n in range(9)), {"question": "word " * 90, "answer": "1"}],
    )


def no_such_reward(project: Project) -> None:
    project.option(reward=f"{project.module}:grades")


def a_reward_that_raises(project: Project) -> None:
    (project.folder / f"{project.module}.py").write_text("def grade(completion, task):\n    return task['level']\n")


def a_reward_that_is_text(project: Project) -> None:
    (project.folder / f"{project.module}.py").write_text("def grade(completion, task):\n    return 'good'\n")


def a_component_is_missing(project: Project) -> None:
    project.option(reward_weights={"correct": 1.0})


def an_agent_that_cannot_be_imported(project: Project) -> None:
    project.keys |= {"agent.function": "nowhere.agents:solve", "environment.name": "rows"}
    project.keys["environment.options"] = {
        name: project.keys["environment.options"][name] for name in ("train_path", "eval_path")
    }


def a_variable_is_not_set(project: Project) -> None:
    project.keys["reward.variables"] = ["NOBODYS_KEY_OF_GSPO"]


@pytest.mark.parametrize(
    ("wrong", "check", "text", "way_out"),
    [
        (no_tokenizer, "tokenizer", "tokenizer.json: no such file", "tokenizer.json"),
        (tokenizer_of_another_model, "tokenizer", "do not belong together", "tokenizer"),
        (no_stop_token, "tokenizer", "end of a turn cannot be recognised", "tokenizer"),
        (template_without_the_answer, "chat template", "drops what the assistant said", "chat_template.jinja"),
        (template_that_opens_nothing, "chat template", "does not open an answer", "add_generation_prompt"),
        (template_with_an_error, "tokenizer", "chat_template.jinja: chat template line 1", "chat template"),
        (
            template_that_refuses,
            "chat template",
            "refuses the conversation: TemplateError: not today",
            "chat_template.jinja",
        ),
        (a_variable_of_the_renderer, "tokenizer", "model.template_arguments: template argument 'messages'", "tokenizer"),
        (no_file, "train tasks", "there is no file", "environment.options"),
        (no_column, "train tasks", 'no column "prompt": there are answer, question', "file"),
        (bytes_that_are_no_text, "train tasks", "train.jsonl, line 1: not JSON", "file"),
        (no_eval_split, "eval tasks", "needs eval_path", "environment.options"),
        (an_unknown_option, "train tasks", "has no option trian_path", "environment.options"),
        (no_such_environment, "train tasks", "no module nowhere", "code"),
        (prompts_that_are_too_long, "train prompts", "1 leave no room for an answer", "raise sampling.max_tokens"),
        (no_such_reward, "reward", "grades", "installed"),
        (a_reward_that_raises, "episode", "KeyError", "gspo env try"),
        (a_reward_that_is_text, "episode", "'good'", "gspo env try"),
        (a_component_is_missing, "episode", '"correct"', "gspo env try"),
        (an_agent_that_cannot_be_imported, "agent", "nowhere", "installed"),
        (a_variable_is_not_set, "reward", "NOBODYS_KEY_OF_GSPO", "set it in the shell"),
    ],
)
def test_broken_tasks_and_code_are_found(wrong: Break, check: str, text: str, way_out: str, project: Project) -> None:
    wrong(project)
    found = the_failure(project.findings())
    assert found.check == check
    assert text in found.text
    assert way_out in found.way_out
    assert found.basis == "tried"


def test_a_template_that_ends_earlier_answers_otherwise_is_warned_of(project: Project) -> None:
    """As gpt-oss does: episodes of one turn can be trained on."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' and not loop.last %}!{% else %}"
        "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (project.model / "chat_template.jinja").write_text(template)
    findings = project.findings()
    (found,) = [finding for finding in findings if finding.check == "chat template"]
    assert (found.status, failures(findings)) == ("warn", [])
    assert "an episode has one turn" in found.text
    assert "ends an earlier answer with other tokens" in found.text


@pytest.mark.parametrize("pinned", [False, True])
def test_a_template_that_writes_the_date_is_named_and_can_be_pinned(project: Project, *, pinned: bool) -> None:
    """Llama 3 and Granite."""
    path = project.model / "chat_template.jinja"
    path.write_text("{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + path.read_text())
    if pinned:
        project.keys["model.template_arguments"] = {"date_string": "26 Jul 2024"}
    found = [finding for finding in project.findings() if finding.check == "chat template"]
    assert [finding.status for finding in found] == (["ok"] if pinned else ["note", "ok"])
    if not pinned:
        assert found[0].text.startswith("it writes the date of the day: ")
        assert 'model.template_arguments = { date_string = "' in found[0].way_out


def test_a_taken_port_is_found_and_a_port_that_two_have(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        project.keys["broker.work_endpoint"] = f"tcp://127.0.0.1:{port}"
        findings = project.findings(code=False)
        assert not failures(findings)
        (found,) = [each for each in findings if "taken by" in each.text]
        assert (found.status, f"broker.work_endpoint {port}; gspo run takes others" in found.text) == ("note", True)
        del project.keys["broker.work_endpoint"]
        project.keys |= {"rollout.num_servers": 1, "rollout.server_port": port}
        found = the_failure(project.findings(code=False))
        assert f"rollout.server_port {port}" in found.text
        assert "ss -ltnp" in found.way_out
    del project.keys["rollout.server_port"]
    project.keys |= {"broker.work_endpoint": f"tcp://127.0.0.1:{port}", "learner.metrics_port": port}
    doubled = the_failure(project.findings(code=False))
    assert doubled.text == f"broker.work_endpoint and learner.metrics_port are both {port}"


def test_several_rollouts_on_one_server_are_found(project: Project) -> None:
    project.keys |= {"rollout.num_servers": 2, "rollout.server_url": "http://127.0.0.1:30000"}
    assert "rollout.num_servers = 1" in the_failure(project.findings(code=False)).way_out


def test_a_run_directory_that_is_a_file_is_found(project: Project) -> None:
    (project.folder / "run").write_text("")
    found = the_failure(project.findings(code=False))
    assert (found.check, found.text) == (
        "run directory",
        f"run.directory is {project.folder}/run: {project.folder}/run is a file",
    )


def test_a_directory_with_another_run_is_found_and_one_with_this_run_is_not(project: Project) -> None:
    settings = load_settings(project.config, (), {})
    settings.run.directory.mkdir()
    write_run_settings(settings)
    (noted,) = [finding for finding in project.findings(code=False) if finding.check == "run directory"]
    assert (noted.status, "it is continued" in noted.text) == ("note", True)
    project.keys["batch.max_lag"] = 3
    found = the_failure(project.findings(code=False))
    assert "other settings (batch)" in found.text
    assert "--set run.directory" in found.way_out
    (settings.run.directory / "settings.json").write_text("{")
    assert "cannot be read" in the_failure(project.findings(code=False)).text


def test_keys_that_are_not_there_are_found(project: Project) -> None:
    project.keys["security.keys"] = str(project.folder / "keys")
    found = the_failure(project.findings(code=False))
    assert found.check == "keys"
    assert found.way_out.startswith(f"`gspo keys {project.folder}/keys` makes keys")
    (project.folder / "keys").mkdir()
    assert "broker.secret" in the_failure(project.findings(code=False)).text


def test_what_does_not_fit_into_memory_is_found(project: Project) -> None:
    project.configure_model(**QWEN3_30B)
    (project.model / "model.safetensors").unlink()
    write_weights(project.model / "model.safetensors", 30_532_122_624, "BF16")
    project.keys |= {"model.dtype": "bfloat16", "learner.dtype": "bfloat16", "learner.learning_rate": 1e-6}
    found = {finding.check: finding for finding in failures(project.findings(gpus("4090", 2), code=False))}
    assert set(found) >= {"learner memory", "engine memory", "KV cache"}
    assert "learner.activation_checkpointing = true" in found["learner memory"].way_out
    (disk,) = [finding for finding in project.findings(code=False) if finding.check == "disk"]
    # Three checkpoints of 12 bytes a parameter, and the export.
    assert "at most 1,100 GiB" in disk.text
    (of_host,) = [finding for finding in project.findings(LAPTOP, code=False) if finding.check == "memory"]
    assert of_host.status == "fail"


def test_what_makes_a_rank_smaller_that_trains_one_long_sequence_is_named(project: Project) -> None:
    project.configure_model(**QWEN3_8B | {"max_position_embeddings": 262_144})
    project.keys |= {"learner.num_ranks": 4, "learner.activation_checkpointing": True}
    project.keys |= {"sampling.max_tokens": 262_144, "rollout.max_total_tokens": 524_288}
    found = {finding.check: finding.way_out for finding in project.findings(gpus("4090", 8), code=False)}
    for way in ("learner.mlp_tiles = 8", "learner.sequence_parallel = 4", "learner.activation_offload = true"):
        assert way in found["learner memory"]
    project.keys["learner.num_ranks"] = 3
    found = {finding.check: finding.way_out for finding in project.findings(gpus("4090", 8), code=False)}
    assert "sequence_parallel" not in found["learner memory"], "three ranks cannot share 32 heads"


def test_more_ranks_than_gpus_are_found_and_engines_of_several_ranks(project: Project) -> None:
    project.keys |= {"learner.num_ranks": 4, "rollout.tensor_parallel": 3}
    found = {finding.check: finding.text for finding in failures(project.findings(gpus("H100", 2), code=False))}
    assert found["GPUs"] == "4 ranks of the learner need as many GPUs; there are 2"
    assert "which 3 ranks do not divide" in found["engine ranks"]


def test_a_disk_without_room_is_found(project: Project) -> None:
    free = os.statvfs(project.folder)
    # Ten thousand batches of two thousand sequences of 64 tokens would take 30 TB.
    project.keys |= {"batch.groups_per_batch": 20_000, "run.num_batches": 10_000, "broker.keep_batches": 0}
    assert free.f_bavail * free.f_frsize < 1e13
    found = the_failure(project.findings(code=False))
    assert (found.check, found.basis) == ("disk", "estimated")
    assert "make room" in found.way_out


def test_what_is_missing_is_no_fault_of_a_run_elsewhere(project: Project, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (project.model / name).unlink()
    project.option(train_path="/nowhere/train.jsonl")
    project.keys["security.keys"] = "/nowhere/keys"
    findings = project.findings(elsewhere=True)
    assert failures(findings) == []
    missing = {finding.check for finding in findings if "other machines" in finding.text and finding.status == "note"}
    assert missing >= {"weights", "tokenizer", "train tasks", "keys", "ports"}
    # What is wrong everywhere is a fault there, too.
    project.configure_model(layer_types=["chunked_attention"])
    assert the_failure(project.findings(code=False, elsewhere=True)).check == "architecture"


ODD = (True, -1, 10**30, "../../etc", "\0", [[1]], {"a": 1})


@pytest.mark.parametrize("key", sorted(QWEN3_30B | {"layer_types": 0, "router_jitter_noise": 0, "attention_bias": 0}))
def test_whatever_config_json_says_is_answered(key: str, project: Project) -> None:
    for value in ODD:
        project.configure_model(**{key: value} if key != "model_type" else {**QWEN3_30B, key: value})
        assert project.findings(code=False)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}',
     struct.pack("<Q", 54) + b'{"a": {"dtype": 1, "shape": ["x"], "data_offsets": [0, 0]}}', struct.pack("<Q", 2**40)],
)  # fmt: skip
def test_files_that_are_no_weights_are_named(content: bytes, project: Project) -> None:
    (project.model / "model.safetensors").write_bytes(content)
    found = the_failure(project.findings(code=False))
    assert (found.check, "model.safetensors: cut off" in found.text) == ("weights", True)


def group_reward(project: Project, body: str) -> None:
    path = project.folder / f"{project.module}.py"
    path.write_text(f"{path.read_text()}\n\ndef beside({body}\n")
    project.keys["reward.group"] = f"{project.module}:beside"


def test_a_group_reward_is_tried_with_two_answers(project: Project) -> None:
    group_reward(project, "completions, task, rewards):\n    return [{'place': 3.0 * n} for n in range(len(completions))]")
    findings = project.findings()
    assert failures(findings) == []
    (episode,) = [finding for finding in findings if finding.check == "episode"]
    assert episode.text == "an echo of task 0 gets 0 (brief 1, right 1, place 0) in 1 turns"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("completions):\n    return [0.0] * len(completions)", "as reward.group it is called with completions and task"),
        ("completions, task):\n    return [0.0]", "reward.group returned 1 rewards: expected a list of 2, one for each"),
    ],
)
def test_a_group_reward_that_cannot_work_is_found(project: Project, body: str, text: str) -> None:
    group_reward(project, body)
    assert text in the_failure(project.findings()).text
