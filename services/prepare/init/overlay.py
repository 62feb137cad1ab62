"""The kustomize overlay of a new project on a cluster: it carries the project's code and rows as ConfigMaps."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Final

from gspo_services.prepare.cluster_check import MAX_CONFIG_MAP_BYTES
from gspo_services.prepare.init.choices import Answers
from gspo_services.prepare.init.plan import GPUS_OF_A_NODE, ProjectPlan
from gspo_services.prepare.init.rows import TaskRows, as_jsonl
from gspo_services.prepare.init.toml_text import VOLUME_DATA

CONFIG_MAP_DATA: Final = "/etc/gspo/data/"
"""Where components/data puts the rows."""
USUAL_PARAMETERS: Final = 8e9
"""Of a model whose size is not known."""
CHECKPOINT_BYTES: Final = 12 * 4
"""For each parameter: two checkpoints are kept, a third is written, and there is room for one that is kept as the best."""
HEAD: Final = """\
# Written by `gspo init`: the run's configuration, code and rows are in this directory. docs/guide/kubernetes.md
#
#     kubectl apply -k . --server-side
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: gspo
"""
SIZES: Final = """\
# How large this run is.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: learner-run
spec:
  resources: {{requests: {{storage: {storage}Gi}}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: backups
spec:
  resources: {{requests: {{storage: {storage}Gi}}}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: learner
spec:
  template:
    spec:
      containers:
        - name: learner
          resources:
            requests: {{nvidia.com/gpu: "{ranks}"}}
            limits: {{nvidia.com/gpu: "{ranks}"}}
"""
DOWNLOAD: Final = """\
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: model-download
spec:
  template:
    spec:
      initContainers:
        - name: download
          env:
            - {{name: MODEL, value: {hub_name}}}
            - {{name: DATASET, value: ""}}
"""
ONE_NODE: Final = """\
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: model
spec:
  accessModes: [ReadWriteOnce]      # one node
"""
MODEL: Final = """\
# Bind it to a volume with {path}: docs/guide/kubernetes.md#gpus
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: model
spec:
  accessModes: [ReadWriteMany]
  resources: {{requests: {{storage: 100Gi}}}}
"""


def on_cluster(rows: TaskRows) -> TaskRows:
    """The rows as a broker of a cluster finds them: in a ConfigMap, or on the volume `model` where none holds them."""
    small = sum(len(as_jsonl(split).encode()) for split in (rows.train, rows.held_out)) < MAX_CONFIG_MAP_BYTES
    if small:
        train, held_out = (CONFIG_MAP_DATA + name for name in ("train.jsonl", "eval.jsonl"))
        return replace(rows, is_written=True, train_path=train, eval_path=held_out)
    train, held_out = (VOLUME_DATA + posixpath.basename(path) for path in (rows.train_path, rows.eval_path))
    return replace(rows, train_path=train, eval_path=held_out)


def overlay_files(answers: Answers, plan: ProjectPlan, files: Mapping[str, str], parameters: float | None) -> dict[str, str]:
    """kustomization.yaml and what it names, by path. ``files``: the project's others."""
    code = [name for name in files if name.endswith(".py")]
    data = [name for name in files if name.startswith("data/") and CONFIG_MAP_DATA in files["run.toml"]]
    one_node = answers.num_gpus <= GPUS_OF_A_NODE
    chosen = {
        "gpu": True, "keys": True, "model-download": bool(answers.hub_name), "code": bool(code), "data": bool(data),
        "tools": True, "one-node": one_node, "sandbox": answers.kind == "code",
    }  # fmt: skip
    own = [] if answers.hub_name else ["model.yaml"]
    lines = ["resources:", *(f"  - {name}" for name in (f"{answers.manifests}/base", *own)), "components:"]
    lines += [f"  - {answers.manifests}/components/{name}" for name, wanted in chosen.items() if wanted]
    lines += ["patches:", "  - path: sizes.yaml", "configMapGenerator:"]
    lines.append("  - {name: gspo-run, behavior: replace, files: [run.toml]}")
    for name, own_files in (("gspo-code", code), ("gspo-data", data)):
        if own_files:
            lines.append(f"  - {{name: {name}, files: [{', '.join(own_files)}]}}")
    lines.append("images:      # your registry, and the tag that you pushed")
    for name in ("gspo-broker", "gspo-rollout", "gspo-learner"):
        lines.append(f"  - {{name: {name}, newName: registry.example.com/{name}, newTag: {version('gspo')}}}")
    storage = max(20, round((parameters or USUAL_PARAMETERS) * CHECKPOINT_BYTES / 2**30))
    sizes = SIZES.format(storage=storage, ranks=plan.num_ranks)
    sizes += DOWNLOAD.format(hub_name=answers.hub_name) if answers.hub_name else ""
    sizes += ONE_NODE if one_node else ""
    written = {"kustomization.yaml": HEAD + "\n".join(lines) + "\n", "sizes.yaml": sizes}
    return written if answers.hub_name else written | {"model.yaml": MODEL.format(path=answers.model)}
