"""``gspo check --kubernetes DIR``: what would go wrong with rendered manifests on a cluster."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.prepare.cluster_check.checks import faults_of
from gspo_services.prepare.cluster_check.fields import missing
from gspo_services.prepare.cluster_check.model import ClusterFault, ClusterModel, read_manifests, title_of
from gspo_services.shared.runtime.errors import EXIT_FAILED
from gspo_services.shared.runtime.plain_text import one_line

DESCRIPTION: Final = """\
Play rendered manifests through on a model of a cluster: resolve names, put pods on nodes, start their containers, probe
them, and let them connect. One entry for each fault: where it is, what will happen, and the way out.

  kubectl kustomize deploy/k8s/overlays/cpu > rendered/all.yaml
  gspo check --kubernetes rendered

Nodes are taken to have 64 CPUs and 256 GiB, or 192 CPUs, 2 TiB and 8 GPUs. For your own, put them beside the manifests:
`kubectl get nodes -o yaml > rendered/nodes.yaml`.

Status 0: it can work; 1: it cannot; 2: the manifests cannot be read.
"""


def check_cluster(argv: Sequence[str]) -> int:
    """Parse the command line and check. Returns the exit status. Raises: ConfigurationError for what cannot be read."""
    parser = argparse.ArgumentParser(
        prog="gspo check", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kubernetes", type=Path, required=True, metavar="DIR", help="a folder, or a file, of rendered manifests"
    )
    parser.add_argument("--json", action="store_true", help="print the faults as JSON")
    arguments = parser.parse_args(argv)
    cluster = read_manifests(arguments.kubernetes)
    found = faults_of(cluster)
    sys.stdout.write((_as_json(cluster, found) if arguments.json else _as_text(cluster, found)) + "\n")
    return EXIT_FAILED if any(fault.status == "fail" for fault in found) else 0


def _place(cluster: ClusterModel, fault: ClusterFault) -> tuple[str, int]:
    manifest = cluster.manifest_of(fault.item)
    return manifest.file, manifest.line_of(fault.way)


def _as_text(cluster: ClusterModel, found: Sequence[ClusterFault]) -> str:
    lines = []
    for fault in found:
        file, line = _place(cluster, fault)
        lines.append(one_line(f"{fault.status}  {file}:{line}: {title_of(fault.item)} {fault.field}"))
        lines.append(f"      {one_line(fault.text)}")
        lines.append(f"      -> {one_line(fault.way_out)}")
    failures = sum(fault.status == "fail" for fault in found)
    lines.append(
        f"{len(cluster.objects)} objects, {len(cluster.pods)} kinds of pods: "
        f"{failures} failures, {len(found) - failures} warnings" + ("; it cannot work as it is" if failures else "")
    )
    lines += [text] if (text := missing()) else []
    return "\n".join(lines)


def _as_json(cluster: ClusterModel, found: Sequence[ClusterFault]) -> str:
    rows = []
    for fault in found:
        file, line = _place(cluster, fault)
        rows.append(
            {
                "status": fault.status, "file": file, "line": line, "object": title_of(fault.item), "field": fault.field,
                "text": fault.text, "way_out": fault.way_out,
            }
        )  # fmt: skip
    status = "fail" if any(row["status"] == "fail" for row in rows) else "ok"
    return json.dumps({"status": status, "findings": rows, "not_checked": missing()}, indent=2)
