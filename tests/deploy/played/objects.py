"""Mistakes in single objects and in their references to each other."""

from tests.deploy.edits import (
    MAIN,
    POD,
    Planted,
    container,
    edit_config,
    pod_spec,
    policy_rule,
    rename,
    volume,
)

OBJECTS = {
    "a field that does not exist": Planted(
        "cpu", f"StatefulSet/broker {MAIN}", "containerPorts",
        lambda c: container(c, "broker").update(containerPorts=[]),
    ),
    "a number as the value of a variable": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.env[2].value", "7001 is not of type 'string', 'null'",
        lambda c: container(c, "broker")["env"].append({"name": "X", "value": 7001}),
    ),
    "an unknown kind": Planted(
        "cpu", "Pod/x apiVersion", "serves no Pod as v2",
        lambda c: c.objects.append({"apiVersion": "v2", "kind": "Pod", "metadata": {"name": "x", "namespace": "gspo"}}),
    ),
    "a wrong field of a custom resource": Planted(
        "single-gpu-node-scaled", "ScaledObject/rollout spec", "Additional properties are not allowed ('minReplicas' was",
        lambda c: rename(c.one("ScaledObject", "rollout")["spec"], "minReplicaCount", "minReplicas"),
    ),
    "a wrong field in the template of a LeaderWorkerSet": Planted(
        "qwen3-30b-a3b-lws", "LeaderWorkerSet/learner spec.leaderWorkerTemplate.leaderTemplate.spec.tolerations[0]",
        "tolerationSecond",
        lambda c: pod_spec(c, "learner")["tolerations"][0].update(tolerationSecond=1),
    ),
    "an object in the wrong namespace": Planted(
        "cpu", "Service/broker spec.selector", "selects no pod of default",
        lambda c: c.one("Service", "broker")["metadata"].update(namespace="default"),
    ),
    "an object that is there twice": Planted(
        "cpu", "Service/broker metadata.name", "is there 2 times in namespace gspo",
        lambda c: c.objects.append(c.one("Service", "broker")),
    ),
    "a selector that does not fit its template": Planted(
        "cpu", "Deployment/rollout spec.selector", "but the pods that it makes",
        lambda c: c.role("rollout").template["metadata"]["labels"].update({"app.kubernetes.io/component": "rollouts"}),
    ),
    "a Service that selects nothing": Planted(
        "cpu", "Service/broker spec.selector", "selects no pod of gspo: {'app.kubernetes.io/component'",
        lambda c: c.one("Service", "broker")["spec"]["selector"].update({"app.kubernetes.io/component": "brokr"}),
    ),
    "two workloads that select the same pods": Planted(
        "qwen3-30b-a3b", "StatefulSet/learner-worker spec.selector", "but the pods that it makes",
        lambda c: c.role("learner-worker").template["metadata"]["labels"].update({"app.kubernetes.io/component": "learner"}),
    ),
    "a probe of a port that is not there": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.livenessProbe.httpGet.port",
        "asks port 'telemetry', and the container has work, batch",
        lambda c: container(c, "broker")["livenessProbe"]["httpGet"].update(port="telemetry"),
    ),
    "a Service's port that is not the container's": Planted(
        "cpu", "Service/broker spec.ports[0]", "port 7011 leads to 'work', and StatefulSet/broker has",
        lambda c: c.one("Service", "broker")["spec"]["ports"][0].update(port=7011),
    ),
    "a scrape of a port that is not there": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.podMetricsEndpoints[0].port", "http-metrics",
        lambda c: c.one("PodMonitor", "gspo")["spec"]["podMetricsEndpoints"][0].update(port="http-metrics"),
    ),
    "a policy for a port that is not there": Planted(
        "cpu", "NetworkPolicy/broker spec.ingress", "no policy lets Deployment/rollout reach port work (7001) of",
        lambda c: policy_rule(c, "broker", "ingress", 0)["ports"][0].update(port="wrk"),
    ),
    "a mount without a volume": Planted(
        "cpu", f"Deployment/rollout {MAIN}.volumeMounts[7].name", "mounts 'cache', and the pod has no volume of that name",
        lambda c: container(c, "rollout")["volumeMounts"].append({"name": "cache", "mountPath": "/cache"}),
    ),
    "a ConfigMap that is not there": Planted(
        "cpu", f"StatefulSet/broker {POD}.volumes[0].configMap.name", "no ConfigMap gspo-runs",
        lambda c: volume(c, "broker", "config")["configMap"].update(name="gspo-runs"),
    ),
    "a claim that is not there": Planted(
        "single-gpu-node", f"Deployment/rollout {POD}.volumes[4].persistentVolumeClaim.claimName",
        "no PersistentVolumeClaim models",
        lambda c: volume(c, "rollout", "model")["persistentVolumeClaim"].update(claimName="models"),
    ),
    "two nodes that write a claim of one": Planted(
        "qwen3-30b-a3b", "PersistentVolumeClaim/learner-run spec.accessModes",
        "is ReadWriteOnce, a volume of one node, and the pods of",
        lambda c: c.one("PersistentVolumeClaim", "learner-run")["spec"].update(accessModes=["ReadWriteOnce"]),
    ),
    "a StatefulSet without its Service": Planted(
        "cpu", "StatefulSet/broker spec.serviceName", "its Service brokers is not there",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(serviceName="brokers"),
    ),
    "a Service that hides pods that are not ready": Planted(
        "cpu", "Service/learner spec.publishNotReadyAddresses", "hides the pods of StatefulSet/learner until they are ready",
        lambda c: c.one("Service", "learner")["spec"].update(publishNotReadyAddresses=False),
    ),
    "an autoscaler of something that is not there": Planted(
        "single-gpu-node-scaled", "ScaledObject/rollout spec.scaleTargetRef",
        "scales Deployment/rollouts, which is not there",
        lambda c: c.one("ScaledObject", "rollout")["spec"]["scaleTargetRef"].update(name="rollouts"),
    ),
    "a standby that is started again because it does not lead": Planted(
        "cpu-standby", f"StatefulSet/broker {MAIN}.startupProbe.httpGet.path",
        "asks /readyz, and a broker that waits to lead is not ready",
        lambda c: container(c, "broker")["startupProbe"]["httpGet"].update(path="/readyz"),
    ),
    "a number of replicas beside an autoscaler": Planted(
        "cpu-monitored", "Deployment/rollout spec.replicas", "sets replicas",
        lambda c: c.one("Deployment", "rollout")["spec"].update(replicas=2),
    ),
    "a limit below its request": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.resources.requests.memory",
        "requests memory 512Mi, which is more than its limit 100Mi",
        lambda c: container(c, "broker")["resources"]["limits"].update(memory="100Mi"),
    ),
    "a quantity that cannot be read": Planted(
        "cpu", f"StatefulSet/broker {MAIN}.resources.limits.memory",
        "'2GB' is not a quantity: expected a number with m, k, M, G",
        lambda c: container(c, "broker")["resources"]["limits"].update(memory="2GB"),
    ),
    "a priority class that is not there": Planted(
        "cpu", f"StatefulSet/broker {POD}.priorityClassName", "no PriorityClass",
        lambda c: pod_spec(c, "broker").update(priorityClassName="gspo-high"),
    ),
    "a container that may run as root": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.securityContext", "and learner has not",
        lambda c: pod_spec(c, "learner")["securityContext"].update(runAsNonRoot=False),
    ),
    "a pod in the network of its node": Planted(
        "cpu", f"Deployment/rollout {MAIN}.securityContext", "rollout has not hostNetwork: false",
        lambda c: pod_spec(c, "rollout").update(hostNetwork=True),
    ),
    "a privileged container": Planted(
        "single-gpu-node", f"StatefulSet/learner {MAIN}.securityContext", "learner has not privileged: false",
        lambda c: container(c, "learner")["securityContext"].update(privileged=True),
    ),
    "an image without a version": Planted(
        "cpu", f"Deployment/rollout {MAIN}.image", "gspo-cpu:latest",
        lambda c: container(c, "rollout").update(image="gspo-cpu:latest"),
    ),
    "a capability": Planted(
        "qwen3-30b-a3b-full", f"StatefulSet/learner {MAIN}.securityContext",
        "the namespace gspo enforces the restricted standard, and",
        lambda c: container(c, "learner")["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    "a read-only root without a scratch directory": Planted(
        "cpu", f"Deployment/rollout {MAIN}.volumeMounts", "its root is read-only and nothing is mounted at /tmp: `gspo",
        lambda c: container(c, "rollout").update(
            volumeMounts=[m for m in container(c, "rollout")["volumeMounts"] if m["mountPath"] != "/tmp"]
        ),
    ),
    "shared memory as large as all memory": Planted(
        "single-gpu-node", f"Deployment/rollout {POD}.volumes[0].emptyDir.sizeLimit",
        "/dev/shm may take 96 GiB, all of the container's memory (96",
        lambda c: volume(c, "rollout", "shm")["emptyDir"].update(sizeLimit="96Gi"),
    ),
    "a liveness probe that asks for readiness": Planted(
        "cpu", f"StatefulSet/learner {MAIN}.livenessProbe.httpGet.path",
        "ends a process that waits, for a full disk or an absent",
        lambda c: container(c, "learner")["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "a node of the learner without a probe": Planted(
        "qwen3-30b-a3b-lws", "LeaderWorkerSet/learner spec.leaderWorkerTemplate.workerTemplate.*.livenessProbe",
        "no livenessProbe: a process that hangs is never started again",
        lambda c: container(c, "learner-worker").pop("livenessProbe"),
    ),
    "nodes of the learner that are ready only together": Planted(
        "qwen3-30b-a3b", f"StatefulSet/learner-worker {MAIN}.readinessProbe",
        "is ready only when all nodes are: a rolling update would wait",
        lambda c: container(c, "learner-worker").update(
            readinessProbe={"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 10}
        ),
    ),
    "a startup probe that succeeds before SGLang has started": Planted(
        "cpu", f"Deployment/rollout {MAIN}.startupProbe.httpGet.path",
        "asks '/healthz', which says nothing about SGLang: it loads",
        lambda c: container(c, "rollout")["startupProbe"]["httpGet"].update(path="/healthz"),
    ),
    "a start that is killed before its timeout": Planted(
        "single-gpu-node", f"Deployment/rollout {MAIN}.startupProbe.failureThreshold", "start_timeout_s",
        lambda c: edit_config(c, "start_timeout_s = 1800.0", "start_timeout_s = 3600.0"),
    ),
    "a drain longer than the grace period": Planted(
        "single-gpu-node-scaled", f"Deployment/rollout {POD}.terminationGracePeriodSeconds", "25 s to stop in",
        lambda c: edit_config(c, "[rollout]\n", "[rollout]\ndrain_s = 30.0\n"),
    ),
    "a rollout that stays on a dead node": Planted(
        "cpu", f"Deployment/rollout {POD}.tolerations", "stays for minutes on a node that is gone",
        lambda c: pod_spec(c, "rollout").update(tolerations=pod_spec(c, "rollout")["tolerations"][:1]),
    ),
    "a disruption budget that does not cover the learner": Planted(
        "cpu", "StatefulSet/learner spec.selector", "0 disruption budgets",
        lambda c: c.one("PodDisruptionBudget", "learner")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "trainer"}
        ),
    ),
    "no default policy": Planted(
        "cpu", "Deployment/rollout spec.template.metadata.labels",
        "no policy restricts who connects to Deployment/rollout: every",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "default-deny")),
    ),
    "a policy that leaves out the weights": Planted(
        "cpu", "NetworkPolicy/default-deny spec.egress", "no policy lets Deployment/rollout reach port weights (7003)",
        lambda c: c.one("NetworkPolicy", "rollout")["spec"]["egress"].pop(1),
    ),
    "a policy that lets rollouts reach the batch channel": Planted(
        "cpu", "NetworkPolicy/broker spec.ingress", "Deployment/rollout may connect to port batch of",
        lambda c: [
            policy_rule(c, "broker", "ingress", 0)["ports"].append({"port": "batch"}),
            policy_rule(c, "rollout", "egress", 0)["ports"].append({"port": "batch"}),
        ],
    ),
    "rollouts that cannot reach each other's weights": Planted(
        "single-gpu-node-scaled", "NetworkPolicy/default-deny spec.egress",
        "no policy lets Deployment/rollout reach port peer-weights",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "rollout-peers")),
    ),
    "weights for other rollouts on another port": Planted(
        "single-gpu-node-scaled", "ConfigMap/gspo-run-* data.run.toml",
        "Deployment/rollout binds rollout.peer_weights_endpoint to",
        lambda c: next(port for port in container(c, "rollout")["ports"] if port["name"] == "peer-weights").update(
            containerPort=7005
        ),
    ),
    "collectives that cannot leave the pod": Planted(
        "qwen3-30b-a3b", "StatefulSet/learner spec.template.metadata.labels", "the learner's nodes cannot meet",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "learner-collectives")),
    ),
    "no DNS": Planted(
        "cpu", "Deployment/rollout spec.template.metadata.labels", "cannot ask DNS",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "dns")),
    ),
    "no access for Prometheus": Planted(
        "cpu-monitored", "PodMonitor/gspo spec.selector", "Prometheus, in namespace monitoring, cannot reach port",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "metrics")),
    ),
}  # fmt: skip
