"""Mistakes that people make with clusters, and what the model of one must say about each."""

from tests.deploy.cluster import Cluster, Object
from tests.deploy.edits import MAIN, POD, Planted, container, edit_config, pod_spec, policy_rule, secret, volume


def to_command(main: Object) -> None:
    main["command"] = main.pop("args")


def download(cluster: Cluster) -> Object:
    spec: Object = cluster.one("Deployment", "model-download")["spec"]["template"]["spec"]
    return spec


def claim(cluster: Cluster) -> Object:
    spec: Object = cluster.one("PersistentVolumeClaim", "model")["spec"]
    return spec


def mount(main: Object, name: str) -> Object:
    found: Object = next(each for each in main["volumeMounts"] if each["name"] == name)
    return found


def endpoint(cluster: Cluster) -> Object:
    found: Object = cluster.one("PodMonitor", "gspo")["spec"]["podMetricsEndpoints"][0]
    return found


def toleration(spec: Object, key: str) -> Object:
    found: Object = next(each for each in spec["tolerations"] if each["key"] == key)
    return found


def dns_peer(cluster: Cluster) -> Object:
    found: Object = policy_rule(cluster, "dns", "egress", 0)["to"][0]
    return found


def own(cluster: Cluster, name: str) -> Object:
    """The data of a ConfigMap that the user's overlay makes."""
    found: Object = next(item for item in cluster.of_kind("ConfigMap") if item["metadata"]["name"].startswith(name))["data"]
    return found


OWN = {
    "a ConfigMap without the module that is named": Planted(
        "own", "ConfigMap/gspo-code-* data", "has no my_reward.py: it has reward.py",
        lambda c: own(c, "gspo-code").update({"reward.py": own(c, "gspo-code").pop("my_reward.py")}),
    ),
    "a module that is mounted nowhere": Planted(
        "own", f"Deployment/rollout {MAIN}", "my_reward, and no volume is mounted at the working directory",
        lambda c: container(c, "rollout").pop("workingDir"),
    ),
    "rows that no ConfigMap holds": Planted(
        "own", "ConfigMap/gspo-data-* data.train.jsonl", "holds 1.10 MiB, and the API server takes 1 MiB at most",
        lambda c: own(c, "gspo-data").update({"train.jsonl": "x" * int(1.1 * 2**20), "eval.jsonl": ""}),
    ),
    "rows of which kubectl keeps no copy": Planted(
        "own", "ConfigMap/gspo-data-* data.train.jsonl", "256 KiB at most",
        lambda c: own(c, "gspo-data").update({"train.jsonl": "x" * 300_000}),
    ),
}  # fmt: skip
STARTING = {
    "command in place of args": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.command", "a program 'broker', which is not there",
        lambda c: to_command(container(c, "broker")),
    ),
    "a service account that is not there": Planted(
        "cpu", f"StatefulSet/learner {POD}.serviceAccountName", "no ServiceAccount gspo",
        lambda c: pod_spec(c, "learner").update(serviceAccountName="gspo"),
    ),
    "no fsGroup of the broker": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.volumeMounts[2]", "a new volume belongs to root",
        lambda c: pod_spec(c, "broker")["securityContext"].pop("fsGroup"),
    ),
    "no fsGroup of the download": Planted(
        "single-gpu-node", f"Deployment/model-download {POD}.initContainers[0].volumeMounts[0]", "cannot write to /models",
        lambda c: download(c)["securityContext"].pop("fsGroup"),
    ),
    "an image that is never pulled": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.imagePullPolicy", "ErrImageNeverPull",
        lambda c: container(c, "rollout").update(imagePullPolicy="Never"),
    ),
    "a run's directory that is read-only": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.volumeMounts[2]", "mounted read-only",
        lambda c: mount(container(c, "broker"), "run").update(readOnly=True),
    ),
    "a data set that the broker does not mount": Planted(
        "single-gpu-node", f"StatefulSet/broker {MAIN}.volumeMounts", "where environment.options.eval_path is",
        lambda c: container(c, "broker")["volumeMounts"].remove(mount(container(c, "broker"), "model")),
    ),
    "an evaluation set in another place": Planted(
        "single-gpu-node", f"StatefulSet/broker {MAIN}.volumeMounts", "evaluation.sets.hard.options.eval_path is",
        lambda c: edit_config(c, "[broker]\n", '[evaluation.sets.hard.options]\neval_path = "/data/hard.jsonl"\n[broker]\n'),
    ),
    "a data set that is not downloaded": Planted(
        "single-gpu-node", f"StatefulSet/broker {MAIN}.volumeMounts[2]", "is not what Deployment/model-download downloads",
        lambda c: edit_config(c, "/models/gsm8k/main/train", "/models/GSM8K/main/train"),
    ),
    "a model in a new empty directory": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.volumeMounts[2]", "no init container fills it",
        lambda c: pod_spec(c, "learner").pop("initContainers"),
    ),
    "a home that cannot be written": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.volumeMounts", "nothing is mounted at /home/gspo",
        lambda c: container(c, "rollout")["volumeMounts"].remove(mount(container(c, "rollout"), "home")),
    ),
    "keys that are not there": Planted(
        "single-gpu-node", f"StatefulSet/learner {POD}.volumes[2]", "has no learner.secret",
        lambda c: c.objects.remove(secret(c, "gspo-key-learner")),
    ),
    "the key of another process": Planted(
        "single-gpu-node", f"Deployment/rollout {POD}.volumes[3]", "holds learner.secret, the key of another process",
        lambda c: secret(c, "gspo-key-rollout")["data"].update({"learner.secret": "eA=="}),
    ),
    "a password that is not there": Planted(
        "cpu-standby", f"StatefulSet/broker {MAIN}.env[*].valueFrom.secretKeyRef", "no Secret gspo-database",
        lambda c: c.objects.remove(c.one("Secret", "gspo-database")),
    ),
    "a configuration by subPath": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.volumeMounts[0].subPath", "never updated",
        lambda c: mount(container(c, "learner"), "config").update(mountPath="/etc/gspo/config/run.toml", subPath="run.toml"),
    ),
    "shared memory smaller than the model": Planted(
        "qwen3-30b-a3b", f"Deployment/rollout {POD}.volumes[0].emptyDir.sizeLimit", "Qwen3-30B-A3B in bfloat16 has about 56",
        lambda c: volume(c, "rollout", "shm")["emptyDir"].update(sizeLimit="40Gi"),
    ),
    "a misspelt prefix of settings": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.env[0].name", "no process reads GPSO_BROKER__WORK_ENDPOINT",
        lambda c: container(c, "broker")["env"][0].update(name="GPSO_BROKER__WORK_ENDPOINT"),
    ),
    "pods that are never started again": Planted(
        "cpu", f"Deployment/rollout {POD}.restartPolicy", "refuses the Deployment",
        lambda c: pod_spec(c, "rollout").update(restartPolicy="Never"),
    ),
    "the wrong image": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.image", "not the packages of `gspo learner`",
        lambda c: container(c, "learner").update(image="gspo-broker:0.1.0"),
    ),
}  # fmt: skip
NODE: Object = {
    "apiVersion": "v1", "kind": "Node", "metadata": {"name": "small", "labels": {"disk": "slow"}},
    "status": {"allocatable": {"cpu": "64", "memory": "64Gi", "ephemeral-storage": "9Gi"}},
}  # fmt: skip
SCHEDULING = {
    "a toleration of another effect": Planted(
        "single-gpu-node", f"StatefulSet/learner {POD}.tolerations", "nvidia.com/gpu:NoSchedule",
        lambda c: toleration(pod_spec(c, "learner"), "nvidia.com/gpu").update(effect="NoExecute"),
    ),
    "500 processors": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.resources.requests.cpu", "needs 500 of cpu",
        lambda c: container(c, "learner")["resources"]["requests"].update(cpu="500"),
    ),
    "a volume of one node for pods on several": Planted(
        "qwen3-30b-a3b", "PersistentVolumeClaim/model spec.accessModes", "may be on several",
        lambda c: claim(c).update(accessModes=["ReadWriteOnce"]),
    ),
    "a download that cannot be where its volume is": Planted(
        "single-gpu-node", "PersistentVolumeClaim/model spec.accessModes", "no node on which all pods",
        lambda c: download(c).update(tolerations=[]),
    ),
    "a download that takes the volume to another node": Planted(
        "single-gpu-node", "PersistentVolumeClaim/model spec.accessModes", "Deployment/model-download",
        lambda c: download(c).pop("affinity"),
    ),
    "a port of the node": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.ports[0].hostPort", "takes port 7001",
        lambda c: container(c, "broker")["ports"][0].update(hostPort=7001),
    ),
    "a taint of spot nodes that no cloud sets": Planted(
        "single-gpu-node-scaled", f"Deployment/rollout {POD}.tolerations[3].key", "cloud.google.com/spot",
        lambda c: toleration(pod_spec(c, "rollout"), "cloud.google.com/gke-spot").update(key="cloud.google.com/spot"),
    ),
    "a server of one rank on two GPUs": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.resources.limits.nvidia.com/gpu", "2 GPUs, and its server has",
        lambda c: [each.update({"nvidia.com/gpu": "2"}) for each in container(c, "rollout")["resources"].values()],
    ),
    "memory without a bound": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.resources", "no bound of its memory",
        lambda c: container(c, "broker")["resources"].pop("limits"),
    ),
    "a label that no node has": Planted(
        "cpu", f"StatefulSet/broker {POD}.affinity", "has the labels that it asks for",
        lambda c: [pod_spec(c, "broker").update(nodeSelector={"disk": "fast"}), c.objects.append(NODE)],
    ),
    "a GPU without a limit": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.resources.limits", "the limit is missing",
        lambda c: container(c, "rollout")["resources"]["limits"].pop("nvidia.com/gpu"),
    ),
}  # fmt: skip
NETWORK = {
    "another label of DNS": Planted(
        "cpu", "NetworkPolicy/dns spec.egress", "StatefulSet/broker cannot ask DNS",
        lambda c: dns_peer(c)["podSelector"].update(matchLabels={"k8s-app": "coredns"}),
    ),
    "DNS in another namespace": Planted(
        "cpu", "NetworkPolicy/dns spec.egress", "no policy lets it reach kube-system",
        lambda c: dns_peer(c)["namespaceSelector"].update(matchLabels={"kubernetes.io/metadata.name": "default"}),
    ),
    "OpenShift without its DNS": Planted(
        "cpu-openshift", "NetworkPolicy/dns spec.egress", "openshift-dns, port 5353",
        lambda c: c.one("NetworkPolicy", "dns")["spec"]["egress"].pop(1),
    ),
    "a download through another port": Planted(
        "single-gpu-node", "NetworkPolicy/model-download spec.egress", "port 443",
        lambda c: policy_rule(c, "model-download", "egress", 0)["ports"][0].update(port=80),
    ),
    "Prometheus in another namespace": Planted(
        "cpu-monitored", "NetworkPolicy/metrics spec.ingress", "in namespace monitoring, cannot reach port metrics",
        lambda c: policy_rule(c, "metrics", "ingress", 0)["from"][0]["namespaceSelector"].update(
            matchLabels={"kubernetes.io/metadata.name": "prometheus"}
        ),
    ),
    "sandboxes that no policy lets rollouts reach": Planted(
        "cpu-sandbox", "NetworkPolicy/* spec.egress", "calls sandbox.urls[0] http://sandbox.gspo-sandbox:7010",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "sandbox")),
    ),
    "rewards of a service that is out of reach": Planted(
        "single-gpu-node", "NetworkPolicy/* spec.egress", "calls environment.options.reward_url http://grader.apps:8000/grade",
        lambda c: edit_config(c, "train_path =", 'reward_url = "http://grader.apps:8000/grade"\ntrain_path ='),
    ),
    "a judge that is out of reach": Planted(
        "single-gpu-node", "NetworkPolicy/* spec.egress", "a judge or another service",
        lambda c: edit_config(c, "[broker]\n", "[reward]\nnetwork = true\n[broker]\n"),
    ),
    "a group of nodes with addresses of its own": Planted(
        "qwen3-30b-a3b-lws", "ConfigMap/gspo-run-* data.run.toml", "learner-0.learner is no name of LeaderWorkerSet/learner",
        lambda c: c.one("LeaderWorkerSet", "learner")["spec"].update(
            networkConfig={"subdomainPolicy": "UniquePerReplica"}
        ),
    ),
}  # fmt: skip
KEEPING = {
    "three brokers": Planted(
        "cpu", "StatefulSet/broker spec.replicas", "3 brokers",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(replicas=3),
    ),
    "a group that does not start again as a whole": Planted(
        "qwen3-30b-a3b-lws", "LeaderWorkerSet/learner spec.leaderWorkerTemplate.restartPolicy", "keep waiting",
        lambda c: c.one("LeaderWorkerSet", "learner")["spec"]["leaderWorkerTemplate"].update(restartPolicy="None"),
    ),
    "a budget that never lets a rollout go": Planted(
        "cpu", "PodDisruptionBudget/rollout spec.maxUnavailable", "waits for ever",
        lambda c: c.one("PodDisruptionBudget", "rollout")["spec"].update(maxUnavailable=0),
    ),
    "a budget that lets a drain end the broker": Planted(
        "cpu", "PodDisruptionBudget/broker spec", "a drain may end the broker at any time",
        lambda c: c.one("PodDisruptionBudget", "broker")["spec"].update(maxUnavailable=1),
    ),
    "updates on deletion only": Planted(
        "cpu", "StatefulSet/learner spec.updateStrategy.type", "until somebody deletes them",
        lambda c: c.one("StatefulSet", "learner")["spec"].update(updateStrategy={"type": "OnDelete"}),
    ),
    "pods that keep a broken configuration": Planted(
        "cpu", "StatefulSet/learner spec.podManagementPolicy", "OrderedReady",
        lambda c: c.one("StatefulSet", "learner")["spec"].pop("podManagementPolicy"),
    ),
    "a learner that rollouts may push out": Planted(
        "cpu", f"StatefulSet/learner {POD}.priorityClassName", "can end the learner",
        lambda c: pod_spec(c, "learner").update(priorityClassName="gspo-rollout"),
    ),
    "rollouts above the core": Planted(
        "cpu", f"StatefulSet/broker {POD}.priorityClassName", "rollouts have 1000000",
        lambda c: c.one("PriorityClass", "gspo-rollout").update(value=1_000_000),
    ),
    "volumes that are deleted with their set": Planted(
        "cpu", "StatefulSet/broker spec.persistentVolumeClaimRetentionPolicy.whenDeleted", "removes the run's ledger",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(
            persistentVolumeClaimRetentionPolicy={"whenDeleted": "Delete", "whenScaled": "Retain"}
        ),
    ),
    "no room for an update": Planted(
        "cpu", "Deployment/rollout spec.strategy.rollingUpdate", "both 0",
        lambda c: c.one("Deployment", "rollout")["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=0),
    ),
    "a number of rollouts that every apply sets back": Planted(
        "cpu", "Deployment/rollout spec.replicas", "sets back",
        lambda c: c.one("Deployment", "rollout")["spec"].update(replicas=8),
    ),
}  # fmt: skip
TIMES = {
    "a preStop longer than the grace period": Planted(
        "cpu", f"Deployment/rollout {MAIN}.lifecycle.preStop", "waits 60 s, and the pod is killed after 45 s",
        lambda c: container(c, "rollout").update(lifecycle={"preStop": {"exec": {"command": ["sleep", "60"]}}}),
    ),
    "a liveness probe from the first second on": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.startupProbe", "no startupProbe",
        lambda c: container(c, "learner").pop("startupProbe"),
    ),
    "a liveness probe that ends what is only busy": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.livenessProbe", "no sign that it hangs",
        lambda c: container(c, "broker")["livenessProbe"].update(periodSeconds=1),
    ),
    "a startup budget too small for SGLang": Planted(
        "cpu", f"Deployment/rollout {MAIN}.startupProbe.failureThreshold", "ended after 100 s, and a start may take 600 s",
        lambda c: container(c, "rollout")["startupProbe"].update(failureThreshold=10),
    ),
    "readiness after an hour": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.readinessProbe.initialDelaySeconds", "after 3610 s at the earliest",
        lambda c: container(c, "learner")["readinessProbe"].update(initialDelaySeconds=3600),
    ),
}  # fmt: skip
WATCHING = {
    "a target of an API that is no more": Planted(
        "cpu-monitored", "HorizontalPodAutoscaler/rollout spec.scaleTargetRef", "of apps/v1beta1, which is not there",
        lambda c: c.one("HorizontalPodAutoscaler", "rollout")["spec"]["scaleTargetRef"].update(apiVersion="apps/v1beta1"),
    ),
    "another path of metrics": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.podMetricsEndpoints[0].path", "404",
        lambda c: endpoint(c).update(path="/metrics/"),
    ),
    "a scrape longer than its interval": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.podMetricsEndpoints[0].scrapeTimeout", "longer than the interval",
        lambda c: endpoint(c).update(scrapeTimeout="30s"),
    ),
    "a label that no pod has": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.podMetricsEndpoints[0].relabelings[0].sourceLabels", "would be empty",
        lambda c: endpoint(c)["relabelings"][0].update(sourceLabels=["__meta_kubernetes_pod_label_component"]),
    ),
    "a label of another name": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.podMetricsEndpoints[0].relabelings", "no label component",
        lambda c: endpoint(c)["relabelings"][0].update(targetLabel="role"),
    ),
    "rollouts that go before they have started": Planted(
        "cpu-monitored", "HorizontalPodAutoscaler/rollout spec.behavior.scaleDown.stabilizationWindowSeconds", "after 60 s",
        lambda c: c.one("HorizontalPodAutoscaler", "rollout")["spec"]["behavior"]["scaleDown"].update(
            stabilizationWindowSeconds=60
        ),
    ),
    "a query about another run": Planted(
        "another-run-scaled", "ScaledObject/rollout spec.triggers[0].metadata.query", "about the run in namespace gspo,",
        lambda c: c.one("ScaledObject", "rollout")["spec"]["triggers"][0]["metadata"].update(
            query='max(gspo_rollouts_wanted{namespace="gspo"})'
        ),
    ),
}  # fmt: skip
PLANTED = OWN | STARTING | SCHEDULING | NETWORK | KEEPING | TIMES | WATCHING
