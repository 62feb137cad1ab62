"""The Python environments of the small images, made as in their Dockerfiles: they start, and their bills of materials fit.

Run by `make test-wheel`; needs a package index. Images are not built here.
"""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.installation import ROOT, environment, pip

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]
PREFIX = "/opt/gspo"
PARQUET = """
import pyarrow, pyarrow.ipc, pyarrow.parquet as parquet, sys
table = pyarrow.table({"ids": pyarrow.array([[1, 2], [3]], pyarrow.list_(pyarrow.int32())), "text": ["a", "b"]})
with parquet.ParquetWriter("rows.parquet", table.schema, compression="zstd", use_dictionary=["text"]) as writer:
    writer.write_table(table)
with parquet.ParquetFile("rows.parquet") as file:
    assert [batch.to_pylist() for batch in file.iter_batches(batch_size=8)] == [table.to_pylist()]
with pyarrow.OSFile("rows.arrow", "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
    stream.write_table(table)
with pyarrow.OSFile("rows.arrow") as file, pyarrow.ipc.open_stream(file) as stream:
    assert stream.read_all().equals(table)
"""


class ImageEnvironment(NamedTuple):
    """What a Dockerfile would put into /opt/gspo."""

    python: Path
    removed_bytes: int


def runs_of(image: str) -> list[str]:
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^RUN (.*)$", text, re.MULTILINE)


def text(requirements: str) -> str:
    return (ROOT / "requirements" / f"{requirements}.txt").read_text()


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def made(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ImageEnvironment]:
    """A function that makes an image's environment, once."""
    cache: dict[str, ImageEnvironment] = {}

    def make(image: str) -> ImageEnvironment:
        if image not in cache:
            place = tmp_path_factory.mktemp(image) / "gspo"
            python = environment(place)
            pip(
                "install",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "-r",
                str(ROOT / "requirements" / f"{image}.txt"),
                python=python,
            )
            before = bytes_below(place)
            for line in [line for line in runs_of(image) if line.startswith("cd ")]:
                subprocess.run(["sh", "-ec", line.replace(PREFIX, str(place))], check=True, timeout=60)
            cache[image] = ImageEnvironment(python, before - bytes_below(place))
            pip("install", "--quiet", "--no-deps", str(wheel), python=python)
        return cache[image]

    return make


def run(python: Path, *words: str, cwd: Path) -> str:
    done = subprocess.run([str(python), "-I", *words], capture_output=True, text=True, check=False, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("image", "module"), [("broker", "broker"), ("sandbox", "tasks.sandbox.server")])
def test_the_entry_point_of_an_image_starts(
    image: str, module: str, made: Callable[[str], ImageEnvironment], tmp_path: Path
) -> None:
    python = made(image).python
    assert "gspo" in run(python, "-m", "gspo_services.cli.main", "--help", cwd=tmp_path)
    run(python, "-c", f"import gspo_services.{module}.__main__", cwd=tmp_path)


def test_the_brokers_image_reads_and_writes_parquet_without_the_rest_of_pyarrow(
    made: Callable[[str], ImageEnvironment], tmp_path: Path
) -> None:
    broker = made("broker")
    run(broker.python, "-c", PARQUET, cwd=tmp_path)
    assert broker.removed_bytes > 60 << 20


@pytest.mark.parametrize("image", ["broker", "sandbox"])
def test_the_bill_of_materials_lists_what_is_installed(
    image: str, made: Callable[[str], ImageEnvironment], tmp_path: Path
) -> None:
    tools = environment(tmp_path / "tools")
    pins = [line.strip(" \\") for name in ("dev", "cpu") for line in text(name).splitlines()]
    shared = [pin for pin in pins if pin.startswith(("packaging==", "sortedcontainers==", "typing_extensions=="))]
    pip("install", "--quiet", "--no-deps", "-r", ROOT / "requirements" / "deploy.txt", python=tools)
    pip("install", "--quiet", "--no-deps", *shared, python=tools)
    bill = tmp_path / "bill.json"
    subprocess.run([tools, "-B", "-m", "deploy.sbom.generate", image, bill], check=True, cwd=ROOT, timeout=60)
    listed = {
        component["purl"].removeprefix("pkg:pypi/") for component in json.loads(bill.read_text())["components"]
        if component.get("purl", "").startswith("pkg:pypi/")
    }  # fmt: skip
    freeze = "from importlib.metadata import distributions as d; print(*(f'{each.name}@{each.version}' for each in d()))"
    found = {re.sub(r"[-_.]+", "-", each.partition("@")[0]).lower() + "@" + each.partition("@")[2]
             for each in run(made(image).python, "-c", freeze, cwd=tmp_path).split()}  # fmt: skip
    # The Dockerfile takes pip out at the end, and the virtual environment's own setuptools is replaced.
    assert {each for each in found if not each.startswith("pip@")} == listed
