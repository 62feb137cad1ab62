"""What an API server keeps of several runs, as far as their manifests need it: objects of namespaces, and of all."""

from collections.abc import Sequence

from tests.deploy.cluster import Cluster, Object, Pods, title


class ApiServer:
    """Objects of all runs; ``namespaces`` has what is in each, for the pods there."""

    def __init__(self) -> None:
        self.namespaces: dict[str, Cluster] = {}
        self._shared: dict[str, Object] = {}

    def apply(self, objects: Sequence[Object]) -> None:
        """``kubectl apply``. Raises: LookupError for an object of a namespace that is not there."""
        for item in objects:
            namespace = item["metadata"].get("namespace")
            if namespace is None:
                self._shared[title(item)] = item
                if item["kind"] == "Namespace":
                    self.namespaces.setdefault(item["metadata"]["name"], Cluster([]))
                continue
            if namespace not in self.namespaces:
                raise LookupError(f'{title(item)}: namespaces "{namespace}" not found')
            inside = self.namespaces[namespace].objects
            inside[:] = [each for each in inside if title(each) != title(item)] + [item]

    def delete(self, objects: Sequence[Object]) -> None:
        """``kubectl delete``. A namespace takes everything in it along."""
        for item in objects:
            name, namespace = item["metadata"]["name"], item["metadata"].get("namespace")
            if namespace is None:
                self._shared.pop(title(item), None)
                if item["kind"] == "Namespace":
                    self.namespaces[name].objects.clear()
            else:
                inside = self.namespaces[namespace].objects
                inside[:] = [each for each in inside if title(each) != title(item)]

    def admit(self, pods: Pods) -> None:
        """Admission of a pod. Raises: LookupError for a PriorityClass that is not there."""
        wanted = pods.spec.get("priorityClassName")
        if wanted and f"PriorityClass/{wanted}" not in self._shared:
            raise LookupError(f"pods of {pods.name} are forbidden: no PriorityClass with name {wanted} was found")
