"""Writes a Helm chart, or with values an overlay of the same objects, of what a kustomization renders.

    python -m deploy.helm.generate deploy/k8s/overlays/cpu dist/gspo
    helm install gspo dist/gspo --values my.yaml --namespace gspo --create-namespace

or

    python -m deploy.helm.generate deploy/k8s/overlays/cpu dist/mine --values my.yaml
    kubectl apply -k dist/mine

The chart's values.yaml has all values, as the overlay has them. Both ways check them by values.schema.json. What all runs
share (deploy/k8s/cluster) is in neither, and no Namespace is. Secrets are no values, and not in the chart.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.helm.chart import chart_of
from deploy.helm.kustomize import FILE, HEADER, overlay_of
from deploy.helm.schema import problems, schema_of
from deploy.helm.values import Object, Values, ValuesError, merged


def rendered(overlay: Path) -> list[Object]:
    """What `kubectl apply -k overlay` would send. Raises: ValuesError with kustomize's message."""
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ValuesError(f"{overlay} cannot be rendered: {done.stderr.strip()}")
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def read_values(path: Path, values: Values) -> Object:
    """The file over the overlay's own values. Raises: ValuesError that names each wrong value and what is allowed."""
    try:
        given: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValuesError(f"{path} cannot be read as YAML: {error}") from error
    found = merged(values.defaults(), given or {}) if given is None or isinstance(given, dict) else given
    if wrong := problems(found, schema_of(values.kinds)):
        raise ValuesError("\n".join(f"{path}: {text}" for text in wrong))
    return dict(found)


def write_chart(files: dict[str, str], chart: Path) -> None:
    """Write the files below ``chart``, in place of an older chart's. Raises: ValuesError."""
    if chart.exists() and any(chart.iterdir()):
        if not (chart / "Chart.yaml").is_file():
            raise ValuesError(f"{chart} has files and is no chart: name another folder")
        shutil.rmtree(chart / "templates", ignore_errors=True)
    for path, text in files.items():
        (chart / path).parent.mkdir(parents=True, exist_ok=True)
        (chart / path).write_text(text, encoding="utf-8")


def write_overlay(text: str, directory: Path) -> None:
    """Write the kustomization into ``directory``. Raises: ValuesError where another one is there."""
    file = directory / FILE
    if file.exists() and not file.read_text(encoding="utf-8").startswith(HEADER):
        raise ValuesError(f"{file} was not written here: name another folder")
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.helm.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overlay", type=Path, help="a kustomization, such as deploy/k8s/overlays/cpu")
    parser.add_argument("directory", type=Path, help="the folder to write to; its name is the chart's")
    parser.add_argument("--values", type=Path, help="write an overlay with these values, for kubectl, in place of a chart")
    parser.add_argument("--version", default="0.1.0", help="of the chart (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        objects = rendered(arguments.overlay)
        if arguments.values is None:
            write_chart(chart_of(objects, arguments.directory.name, arguments.version), arguments.directory)
        else:
            values = Values(objects)
            given = read_values(arguments.values, values)
            write_overlay(overlay_of(values, given, arguments.overlay, arguments.directory), arguments.directory)
    except ValuesError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
