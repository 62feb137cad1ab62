"""requirements/setup/install.py with real pip and indexes on loopback: where PyTorch comes from, and how it fails."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.setup.checkout import Checkout, served, wheel

BASE = {"of_pip-1.0", "of_cpu-1.0", "of_dev-1.0", "of_deepspeed-1.0", "project-1.0"}
DEAD = "http://127.0.0.1:9/simple"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """One environment for all tests here, in the order in which a user would meet them: making it takes most of the time."""
    return Checkout(tmp_path_factory.mktemp("setup"))


@pytest.fixture(scope="module")
def main(checkout: Checkout) -> Iterator[str]:
    with served(checkout.main) as address:
        yield address


@pytest.fixture(scope="module")
def own(checkout: Checkout) -> Iterator[str]:
    with served(checkout.own) as address:
        yield address


def site(checkout: Checkout) -> Path:
    (found,) = (checkout.folder / ".venv" / "lib").glob("python3.*/site-packages")
    return found


def test_without_the_network_nothing_is_made_and_the_index_is_named(checkout: Checkout) -> None:
    done = checkout.setup("cpu", PIP_INDEX_URL="http://me:secret@127.0.0.1:9/simple")
    assert done.returncode == 1
    assert "the package index http://127.0.0.1:9/simple does not answer" in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert checkout.installed() == set()


def test_pytorch_comes_from_its_own_index_if_the_configured_one_has_only_the_ordinary_build(
    checkout: Checkout, main: str, own: str
) -> None:
    done = checkout.setup("cpu", PIP_INDEX_URL=main, GSPO_TORCH_INDEX=own)
    assert done.returncode == 0, done.stderr
    assert checkout.installed() == {*BASE, "torch-2.13.0+cpu"}
    assert f"PyTorch: the CPU build (190 MB) from {own}, since the configured index has none" in done.stdout


def test_a_second_setup_keeps_what_is_there_and_installs_again_what_was_half_installed(
    checkout: Checkout, main: str
) -> None:
    (site(checkout) / "of_cpu-1.0.dist-info" / "INSTALLER").unlink()
    (site(checkout) / "of_cpu.py").unlink()
    done = checkout.setup("cpu", PIP_INDEX_URL=main, GSPO_TORCH_INDEX=DEAD)
    assert done.returncode == 0, done.stderr
    assert "PyTorch 2.13.0+cpu is there" in done.stdout
    assert "of_cpu-1.0 was half installed: once more" in done.stdout
    assert (site(checkout) / "of_cpu.py").exists()


def test_a_dead_extra_index_is_named_once_and_left_out(checkout: Checkout, main: str, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(f"[global]\nextra-index-url = {DEAD}\n    {main}\n")
    (site(checkout) / "of_dev-1.0.dist-info" / "INSTALLER").unlink()
    done = checkout.setup("cpu", PIP_INDEX_URL=main, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"pip's extra index {DEAD} does not answer") == 1
    assert "of_dev-1.0" in checkout.installed()
    # pip says where it looks: with the dead index it would wait for each package.
    assert DEAD not in done.stderr


def test_another_version_of_pytorch_is_replaced_and_without_its_own_index_the_ordinary_build_comes(
    checkout: Checkout, main: str
) -> None:
    installed = site(checkout)
    shutil.rmtree(installed / "torch-2.13.0+cpu.dist-info")
    (installed / "torch.py").write_text("__version__ = '2.12.0'\n")
    done = checkout.setup("cpu", PIP_INDEX_URL=main, GSPO_TORCH_INDEX=DEAD)
    assert done.returncode == 0, done.stderr
    assert checkout.installed() == {*BASE, "torch-2.13.0", "nvidia_part-1.0"}
    assert "the ordinary build with CUDA's libraries (2.5 GB to download), because the configured" in done.stdout
    assert f"and {DEAD} cannot be used: " in done.stdout
    assert (installed / "torch.py").read_text() == "__version__ = '2.13.0'\n"


def test_the_configured_index_is_enough_where_it_has_the_cpu_build(checkout: Checkout, main: str, tmp_path: Path) -> None:
    shutil.rmtree(site(checkout) / "torch-2.13.0.dist-info")
    (site(checkout) / "torch.py").unlink()
    local = next((checkout.own / "simple" / "torch").glob("*.whl"))
    done = checkout.setup("cpu", PIP_INDEX_URL=main, PIP_FIND_LINKS=str(local.parent), GSPO_TORCH_INDEX=DEAD)
    assert done.returncode == 0, done.stderr
    assert "PyTorch: the CPU build, from the configured package index" in done.stdout
    assert "torch-2.13.0+cpu" in checkout.installed()


def test_a_file_that_is_not_the_locked_one_ends_the_setup_and_is_not_installed(checkout: Checkout, main: str) -> None:
    kept = (checkout.folder / "requirements" / "dev.txt").read_text()
    wheel(checkout.main, "later", "1.0")
    checkout.write("dev", "later==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n")
    done = checkout.setup("cpu", PIP_INDEX_URL=main)
    (checkout.folder / "requirements" / "dev.txt").write_text(kept)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "a file is not the one that was locked" in done.stderr.splitlines()[-1]
    assert not (site(checkout) / "later.py").exists()


def test_an_environment_beside_sees_the_main_one_and_has_its_own_list(checkout: Checkout, main: str) -> None:
    checkout.write("more", wheel(checkout.main, "more", "3.0"))
    done = checkout.setup("beside", ".venv-more", "more.txt", PIP_INDEX_URL=main)
    assert done.returncode == 0, done.stderr
    assert checkout.installed(".venv-more") == {"more-3.0"}
    code = "import more, of_cpu, torch; print(of_cpu.__file__)"
    ran = subprocess.run([checkout.folder / ".venv-more/bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(site(checkout) / "of_cpu.py")


def test_a_half_made_environment_is_made_anew(checkout: Checkout, main: str) -> None:
    (checkout.folder / ".venv-more" / "bin" / "python").unlink()
    done = checkout.setup("apart", ".venv-more", "more.txt", PIP_INDEX_URL=main)
    assert done.returncode == 0, done.stderr
    assert ".venv-more is made anew: it has no Python" in done.stdout
    assert checkout.installed(".venv-more") == {"more-3.0", "of_pip-1.0"}


def test_a_folder_of_the_user_is_not_overwritten(checkout: Checkout, main: str) -> None:
    (checkout.folder / ".venv-mine").mkdir()
    (checkout.folder / ".venv-mine" / "thesis.txt").write_text("years of work")
    done = checkout.setup("apart", ".venv-mine", "more.txt", PIP_INDEX_URL=main)
    assert done.returncode == 1
    assert "is not a virtual environment, and would be overwritten: move it away" in done.stderr
    assert (checkout.folder / ".venv-mine" / "thesis.txt").read_text() == "years of work"
