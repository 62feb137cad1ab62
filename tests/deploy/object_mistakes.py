"""Mistakes in single objects and in their references to each other."""

from tests.deploy.edits import Mistake, container, edit_config, pod_spec, policy_rule, rename, volume

OBJECT_MISTAKES = {
    # schema
    "a field that does not exist": Mistake(
        "cpu", "schema", "containerPorts", lambda c: container(c, "broker").update(containerPorts=[])
    ),
    "a number as the value of a variable": Mistake(
        "cpu", "schema", "7001", lambda c: container(c, "broker")["env"].append({"name": "X", "value": 7001})
    ),
    "an unknown kind": Mistake(
        "cpu",
        "schema",
        "no schema",
        lambda c: c.objects.append({"apiVersion": "v2", "kind": "Pod", "metadata": {"name": "x", "namespace": "gspo"}}),
    ),
    "a wrong field of a custom resource": Mistake(
        "single-gpu-node-scaled",
        "schema",
        "minReplicas",
        lambda c: rename(c.one("ScaledObject", "rollout")["spec"], "minReplicaCount", "minReplicas"),
    ),
    "a wrong field in the template of a LeaderWorkerSet": Mistake(
        "qwen3-30b-a3b-lws",
        "schema",
        "tolerationSecond",
        lambda c: pod_spec(c, "learner")["tolerations"][0].update(tolerationSecond=1),
    ),
    # references
    "an object in the wrong namespace": Mistake(
        "cpu", "namespaces", "default", lambda c: c.one("Service", "broker")["metadata"].update(namespace="default")
    ),
    "an object that is there twice": Mistake(
        "cpu", "namespaces", "2 times", lambda c: c.objects.append(c.one("Service", "broker"))
    ),
    "a selector that does not fit its template": Mistake(
        "cpu",
        "selectors",
        "Deployment/rollout",
        lambda c: c.role("rollout").template["metadata"]["labels"].update({"app.kubernetes.io/component": "rollouts"}),
    ),
    "a Service that selects nothing": Mistake(
        "cpu",
        "selectors",
        "Service/broker",
        lambda c: c.one("Service", "broker")["spec"]["selector"].update({"app.kubernetes.io/component": "brokr"}),
    ),
    "two workloads that select the same pods": Mistake(
        "qwen3-30b-a3b",
        "selectors",
        "StatefulSet/learner",
        lambda c: c.role("learner-worker").template["metadata"]["labels"].update({"app.kubernetes.io/component": "learner"}),
    ),
    "a probe of a port that is not there": Mistake(
        "cpu", "ports", "telemetry", lambda c: container(c, "broker")["livenessProbe"]["httpGet"].update(port="telemetry")
    ),
    "a Service's port that is not the container's": Mistake(
        "cpu", "ports", "7011", lambda c: c.one("Service", "broker")["spec"]["ports"][0].update(port=7011)
    ),
    "a scrape of a port that is not there": Mistake(
        "cpu-monitored",
        "ports",
        "http-metrics",
        lambda c: c.one("PodMonitor", "gspo")["spec"]["podMetricsEndpoints"][0].update(port="http-metrics"),
    ),
    "a policy for a port that is not there": Mistake(
        "cpu", "ports", "wrk", lambda c: policy_rule(c, "broker", "ingress", 0)["ports"][0].update(port="wrk")
    ),
    "a mount without a volume": Mistake(
        "cpu",
        "volumes",
        "'cache'",
        lambda c: container(c, "rollout")["volumeMounts"].append({"name": "cache", "mountPath": "/cache"}),
    ),
    "a ConfigMap that is not there": Mistake(
        "cpu",
        "volumes",
        "no ConfigMap gspo-runs",
        lambda c: volume(c, "broker", "config")["configMap"].update(name="gspo-runs"),
    ),
    "a claim that is not there": Mistake(
        "single-gpu-node",
        "volumes",
        "no PersistentVolumeClaim models",
        lambda c: volume(c, "rollout", "model")["persistentVolumeClaim"].update(claimName="models"),
    ),
    "two nodes that write a claim of one": Mistake(
        "qwen3-30b-a3b",
        "shared_volumes",
        "learner-run",
        lambda c: c.one("PersistentVolumeClaim", "learner-run")["spec"].update(accessModes=["ReadWriteOnce"]),
    ),
    "a StatefulSet without its Service": Mistake(
        "cpu",
        "services_of_stateful_sets",
        "no Service brokers",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(serviceName="brokers"),
    ),
    "a Service that hides pods that are not ready": Mistake(
        "cpu",
        "services_of_stateful_sets",
        "hides pods",
        lambda c: c.one("Service", "learner")["spec"].update(publishNotReadyAddresses=False),
    ),
    "an autoscaler of something that is not there": Mistake(
        "single-gpu-node-scaled",
        "scaling",
        "rollouts",
        lambda c: c.one("ScaledObject", "rollout")["spec"]["scaleTargetRef"].update(name="rollouts"),
    ),
    "a standby that is started again because it does not lead": Mistake(
        "cpu-standby",
        "probes",
        "startupProbe asks {'path': '/readyz'",
        lambda c: container(c, "broker")["startupProbe"]["httpGet"].update(path="/readyz"),
    ),
    "a number of replicas beside an autoscaler": Mistake(
        "cpu-monitored", "scaling", "sets replicas", lambda c: c.one("Deployment", "rollout")["spec"].update(replicas=2)
    ),
    "a limit below its request": Mistake(
        "cpu", "resources", "memory requests", lambda c: container(c, "broker")["resources"]["limits"].update(memory="100Mi")
    ),
    "a quantity that cannot be read": Mistake(
        "cpu", "resources", "2GB", lambda c: container(c, "broker")["resources"]["limits"].update(memory="2GB")
    ),
    "a priority class that is not there": Mistake(
        "cpu", "resources", "no PriorityClass", lambda c: pod_spec(c, "broker").update(priorityClassName="gspo-high")
    ),
    # pods
    "a container that may run as root": Mistake(
        "cpu",
        "restricted",
        "may run as root",
        lambda c: pod_spec(c, "learner")["securityContext"].update(runAsNonRoot=False),
    ),
    "an image without a version": Mistake(
        "cpu", "restricted", "gspo-cpu:latest", lambda c: container(c, "rollout").update(image="gspo-cpu:latest")
    ),
    "a capability": Mistake(
        "qwen3-30b-a3b-full",
        "restricted",
        "gain privileges",
        lambda c: container(c, "learner")["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    "a read-only root without a scratch directory": Mistake(
        "cpu",
        "writable",
        "/tmp",
        lambda c: container(c, "rollout").update(
            volumeMounts=[m for m in container(c, "rollout")["volumeMounts"] if m["mountPath"] != "/tmp"]
        ),
    ),
    "shared memory as large as all memory": Mistake(
        "single-gpu-node",
        "writable",
        "volume shm",
        lambda c: volume(c, "rollout", "shm")["emptyDir"].update(sizeLimit="96Gi"),
    ),
    "a liveness probe that asks for readiness": Mistake(
        "cpu",
        "probes",
        "livenessProbe",
        lambda c: container(c, "learner")["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "a node of the learner without a probe": Mistake(
        "qwen3-30b-a3b-lws", "probes", "livenessProbe asks {}", lambda c: container(c, "learner-worker").pop("livenessProbe")
    ),
    "nodes of the learner that are ready only together": Mistake(
        "qwen3-30b-a3b",
        "probes",
        "ready only together with the others",
        lambda c: container(c, "learner-worker").update(
            readinessProbe={"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 10}
        ),
    ),
    "a startup probe that succeeds before SGLang has started": Mistake(
        "cpu",
        "probes",
        "/startupz",
        lambda c: container(c, "rollout")["startupProbe"]["httpGet"].update(path="/healthz"),
    ),
    "a start that is killed before its timeout": Mistake(
        "single-gpu-node",
        "probes",
        "start_timeout_s",
        lambda c: edit_config(c, "start_timeout_s = 1800.0", "start_timeout_s = 3600.0"),
    ),
    "a drain longer than the grace period": Mistake(
        "single-gpu-node-scaled",
        "stopping",
        "25 s to stop in",
        lambda c: edit_config(c, "[rollout]\n", "[rollout]\ndrain_s = 30.0\n"),
    ),
    "a rollout that stays on a dead node": Mistake(
        "cpu",
        "disruption",
        "unreachable",
        lambda c: pod_spec(c, "rollout").update(tolerations=pod_spec(c, "rollout")["tolerations"][:1]),
    ),
    "a disruption budget that does not cover the learner": Mistake(
        "cpu",
        "disruption",
        "0 disruption budgets",
        lambda c: c.one("PodDisruptionBudget", "learner")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "trainer"}
        ),
    ),
    "no default policy": Mistake(
        "cpu", "network", "denies by default", lambda c: c.objects.remove(c.one("NetworkPolicy", "default-deny"))
    ),
    "a policy that leaves out the weights": Mistake(
        "cpu",
        "network",
        "rollout -> learner -> weights is needed",
        lambda c: c.one("NetworkPolicy", "rollout")["spec"]["egress"].pop(1),
    ),
    "a policy that lets rollouts reach the batch channel": Mistake(
        "cpu",
        "network",
        "rollout -> broker -> batch is allowed and not needed",
        lambda c: [
            policy_rule(c, "broker", "ingress", 0)["ports"].append({"port": "batch"}),
            policy_rule(c, "rollout", "egress", 0)["ports"].append({"port": "batch"}),
        ],
    ),
    "rollouts that cannot reach each other's weights": Mistake(
        "single-gpu-node-scaled",
        "network",
        "rollout -> rollout -> peer-weights is needed",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "rollout-peers")),
    ),
    "weights for other rollouts on another port": Mistake(
        "single-gpu-node-scaled",
        "network",
        "weights for other rollouts at tcp://$(POD_IP):7004, but its ports are",
        lambda c: next(port for port in container(c, "rollout")["ports"] if port["name"] == "peer-weights").update(
            containerPort=7005
        ),
    ),
    "collectives that cannot leave the pod": Mistake(
        "qwen3-30b-a3b",
        "network",
        "learner-worker -> learner",
        lambda c: c.objects.remove(c.one("NetworkPolicy", "learner-collectives")),
    ),
    "no DNS": Mistake("cpu", "network", "cannot ask DNS", lambda c: c.objects.remove(c.one("NetworkPolicy", "dns"))),
    "no access for Prometheus": Mistake(
        "cpu-monitored", "network", "cannot be scraped", lambda c: c.objects.remove(c.one("NetworkPolicy", "metrics"))
    ),
}
