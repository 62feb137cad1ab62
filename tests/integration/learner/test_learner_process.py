"""The learner's processes as the operating system sees them."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from gspo_services.shared.runtime.errors import EXIT_CONFIGURATION

PATIENCE_MS = 60_000
START = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"


def test_a_rank_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """The rank's configuration is a named pipe: it opens when the rank reads it, and breaks when the rank is gone."""
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    rank = [sys.executable, "-m", "gspo_services.learner", str(pipe)]
    environment = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "test"}
    with subprocess.Popen([sys.executable, "-c", START, *rank], env=environment) as launcher:
        end = os.open(pipe, os.O_WRONLY)
        try:
            watch = select.poll()
            watch.register(end, 0)
            assert watch.poll(0) == []
            launcher.send_signal(signal.SIGKILL)
            assert watch.poll(PATIENCE_MS) == [(end, select.POLLERR)]
        finally:
            os.close(end)


def test_routing_replay_of_a_dense_model_is_refused_at_the_start(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    (tmp_path / "run.toml").write_text(
        f'[run]\ndirectory = "{tmp_path}"\n[model]\npath = "{tmp_path / "dense"}"\n[objective]\nrouting_replay = true\n'
        # An unused port: at the default one it might connect to another run on this machine.
        '[broker]\nbatch_endpoint = "tcp://127.0.0.1:9"\n'
        '[learner]\nmetrics_port = 0\nweights_endpoint = "tcp://127.0.0.1:*"\n'
    )
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gspo_services.learner", str(tmp_path / "run.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_CONFIGURATION, done.stderr
    reason = "cannot be trained: routing_replay is on and a qwen3 model has no routers: routing replay needs a mixture"
    assert reason in done.stderr
