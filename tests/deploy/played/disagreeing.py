"""Mistakes by which objects of one set contradict each other."""

from typing import Any

from tests.deploy.edits import MAIN, POD, Planted, container, pod_spec, set_environment

QUEUE: dict[str, Any] = {
    "apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": "learner", "namespace": "gspo"},
    "spec": {"clusterQueue": "gspo-learners"},
}  # fmt: skip
SCALER: dict[str, Any] = {
    "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "more", "namespace": "gspo"},
    "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "rollout"}, "minReplicas": 1, "maxReplicas": 9,
             "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}}},
}  # fmt: skip
DISAGREEING = {
    "a pod without the others' login": Planted(
        "single-gpu-node-guarded", f"Deployment/model-download {POD}", "ImagePullBackOff",
        lambda c: pod_spec(c, "model-download").pop("imagePullSecrets"),
    ),
    "a user that one pod fixes": Planted(
        "qwen3-30b-a3b-guarded", f"StatefulSet/learner-worker {POD}.securityContext", "OpenShift refuses it",
        lambda c: pod_spec(c, "learner-worker")["securityContext"].update(runAsUser=10001),
    ),
    "a learner beside the queue": Planted(
        "single-gpu-node-guarded", "StatefulSet/learner metadata.labels", "is in no queue of gspo",
        lambda c: c.one("StatefulSet", "learner")["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name"),
    ),
    "two workloads in a queue": Planted(
        "qwen3-30b-a3b", "StatefulSet/learner metadata.labels", "one by one",
        lambda c: [c.objects.append(QUEUE), *(
            c.one("StatefulSet", name)["metadata"]["labels"].update({"kueue.x-k8s.io/queue-name": "learner"})
            for name in ("learner", "learner-worker")
        )],
    ),
    "images of two releases": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.image", "two releases in one run",
        lambda c: container(c, "broker").update(image="gspo-broker:0.2.0"),
    ),
    "a claim too small for checkpoints": Planted(
        "qwen3-30b-a3b", "PersistentVolumeClaim/learner-run spec.resources.requests.storage",
        "500 GiB are too small for Qwen3-30B-A3B: 3 checkpoints of it have about 1006 GiB",
        lambda c: c.one("PersistentVolumeClaim", "learner-run")["spec"]["resources"]["requests"].update(storage="500Gi"),
    ),
    "a claim too small for the model": Planted(
        "qwen3-30b-a3b", "PersistentVolumeClaim/model spec.resources.requests.storage",
        "50 GiB are too small for Qwen3-30B-A3B: its files have about 56 GiB",
        lambda c: c.one("PersistentVolumeClaim", "model")["spec"]["resources"]["requests"].update(storage="50Gi"),
    ),
    "two autoscalers": Planted(
        "single-gpu-node-scaled", "HorizontalPodAutoscaler/more spec.scaleTargetRef", "each undoes what the other",
        lambda c: c.objects.append(SCALER),
    ),
    "a data set in a ConfigMap": Planted(
        "cpu", "ConfigMap/gspo-run-* data.train.jsonl", "the API server takes 1 MiB",
        lambda c: next(each for each in c.of_kind("ConfigMap"))["data"].update({"train.jsonl": "x" * (1 << 21)}),
    ),
    "a namespace with a capital": Planted(
        "cpu", "Namespace/Gspo metadata", "no name of a namespace",
        lambda c: c.of_kind("Namespace")[0]["metadata"].update(name="Gspo"),
    ),
    "rollouts of another seed": Planted(
        "cpu", f"Deployment/rollout {POD}", "other settings of the run than the broker",
        lambda c: set_environment(c, "rollout", "GSPO_RUN__SEED", "7"),
    ),
}  # fmt: skip
