"""What is built is what users need, installs where they are, and is quiet.

`FASTSERIAL_PACKAGE` is the folder with the built files, `FASTSERIAL_TORCH` the torch to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DIST = Path(os.environ["FASTSERIAL_PACKAGE"])
TORCH = os.environ["FASTSERIAL_TORCH"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# What an extra makes importable. `deepspeed` compiles when it is installed: `nox -s deepspeed`.
EXTRAS = {
    "bench": ["numpy", "transformers", "safetensors", "fastserial.bench.save"],
    "plot": ["matplotlib"],
    "lightning": [
        "fastserial.integrations.lightning",
        "fastserial.integrations.lightning_parallel",
    ],
    "transformers": ["transformers", "accelerate", "fastserial.integrations.transformers"],
    "test": ["pytest", "hypothesis", "dill", "xdist", "fsspec"],
    "remote": ["fsspec", "obstore"],
}
ELSEWHERE = {"deepspeed"}
# torch says so at its import where NumPy is not installed; fastserial does not need it.
STRICT = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")
PROGRAM = ROOT / "tests" / "programs" / "package" / "new_user.py"


@cache
def wheel() -> Path:
    (found,) = DIST.glob("*.whl")
    return found


@cache
def in_wheel() -> dict[str, bytes]:
    with zipfile.ZipFile(wheel()) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@cache
def in_sdist() -> dict[str, bytes]:
    (found,) = DIST.glob("*.tar.gz")
    files = {}
    with tarfile.open(found) as archive:
        for member in archive:
            name = str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
            if (file := archive.extractfile(member)) is not None:
                files[name] = file.read()
    return files


def metadata() -> Message:
    (name,) = (name for name in in_wheel() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(in_wheel()[name].decode())


def in_git(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


# -- contents ------------------------------------------------------------------------------------


def test_wheel_holds_the_package_and_nothing_else() -> None:
    package = in_git("fastserial")
    data = {f"fastserial/_{name}" for name in in_git("patches")}
    rest = {name for name in in_wheel() if ".dist-info/" not in name}
    assert rest == package | data | {"fastserial.pth"}
    assert "fastserial/py.typed" in rest


def test_sdist_holds_all_that_is_in_git() -> None:
    kept = in_git("fastserial", "patches", "benchmarks", "tests", "docs", "fastserial.pth")
    kept |= in_git("noxfile.py", "pyproject.toml", "LICENSE", "README.md")
    kept |= in_git("CHANGELOG.md", "CONTRIBUTING.md")
    assert set(in_sdist()) == kept | {"PKG-INFO", ".gitignore"}


def test_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    (sdist,) = DIST.glob("*.tar.gz")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", "out", "in"]
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    source.rename(tmp_path / "in")
    subprocess.run(command, cwd=tmp_path, check=True)
    (again,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(again) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == in_wheel()


def test_pth_is_one_line_that_imports_little() -> None:
    """It runs at the start of every Python process of the environment."""
    (line,) = in_wheel()["fastserial.pth"].decode().splitlines()
    assert line.startswith("import os; os.environ.get(")
    program = "import sys; print(any(name.startswith('fastserial') for name in sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", f"{line}\n{program}"], capture_output=True, text=True, check=True,
        env={key: value for key, value in os.environ.items() if key != "FASTSERIAL"},
    )  # fmt: skip
    assert ended.stdout.strip() == "False"


# -- metadata ------------------------------------------------------------------------------------


def test_version_is_in_one_place() -> None:
    code = in_wheel()["fastserial/__init__.py"].decode()
    (version,) = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    assert metadata()["Version"] == version
    for name in ("pyproject.toml", "README.md", "noxfile.py"):
        assert f'"{version}"' not in (ROOT / name).read_text(encoding="utf-8"), name


def test_metadata() -> None:
    found = metadata()
    assert found["License-Expression"] == "MIT"
    assert found["Requires-Python"] == ">=3.10"
    assert found["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\((?!https?://|#)([^)]+)\)", str(found.get_payload()))
    assert all((ROOT / link.split("#")[0]).exists() for link in links)
    # all extras are tried
    assert set(found.get_all("Provides-Extra")) == EXTRAS.keys() | ELSEWHERE


# -- installed -----------------------------------------------------------------------------------


def _python(version: str) -> str:
    """Return an interpreter, or skip the test."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path / "bin" / "python") for path in sorted(home.glob(f"{version}.*"))]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        found.append(sys.executable)
    found += filter(None, [shutil.which(f"python{version}")])
    for python in found:
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"needs Python {version}")


class Environment:
    """An empty environment; `site` and other environments cannot be seen from it."""

    def __init__(self, folder: Path, version: str) -> None:
        subprocess.run([_python(version), "-m", "venv", folder], check=True)
        self.bin = folder / "bin"
        hidden = ("PYTHON", "FASTSERIAL", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.variables = {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def install(self, *what: str) -> None:
        self.run("python", "-m", "pip", "install", "-q", *what)

    def run(self, *command: object) -> str:
        words = [str(word) for word in command]
        words[0] = str(self.bin / words[0])
        ended = subprocess.run(
            words, env=self.variables, cwd=self.bin, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_takes_it(version: str, tmp_path: Path) -> None:
    """Without torch, whose builds for some Pythons are 5 GB here: all of it compiles."""
    place = Environment(tmp_path / "venv", version)
    others = [str(need) for need in _needs() if need.name != "torch"]
    place.install(*others)
    place.install("--no-deps", str(wheel()))
    place.run("python", "-W", "error", "-c", "import fastserial; print(fastserial.__version__)")
    place.run("python", "-W", "error", "-m", "compileall", "-q", *_home(place))


def _home(place: Environment) -> list[str]:
    return [place.run("python", "-c", "import fastserial; print(fastserial.__path__[0])").strip()]


def _needs() -> list[Requirement]:
    needs = [Requirement(text) for text in metadata().get_all("Requires-Dist")]
    return [need for need in needs if "extra" not in str(need.marker)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and torch, as `pip install fastserial` makes it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = Environment(tmp_path_factory.mktemp("package") / "venv", version)
    made.install(f"torch=={TORCH}", str(wheel()))
    return made


def test_a_new_user(place: Environment, tmp_path: Path) -> None:
    """No extra, no warning: a program switches it on, saves, loads, and is fast."""
    assert place.run("python", *STRICT, PROGRAM, tmp_path).split() == ["threads", "ok"]
    assert "All is well" in place.run("fastserial", "doctor", tmp_path)
    assert place.run("fastserial", "verify", tmp_path / "new.pt").startswith("ok")


def test_importing_is_silent(place: Environment) -> None:
    program = "import fastserial, sys; sys.exit('torch' in sys.modules)"
    assert place.run("python", "-W", "error", "-c", program) == ""
    switched_on = "import fastserial.auto, fastserial; assert fastserial.installed()"
    assert place.run("python", *STRICT, "-c", switched_on) == ""


def test_every_module_imports_without_extras(place: Environment) -> None:
    """But those that are about the package that is not there."""
    names = sorted(
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in in_wheel()
        if name.startswith("fastserial/") and name.endswith(".py") and "__main__" not in name
    )
    program = ROOT / "tests" / "programs" / "package" / "import_all.py"
    for line in place.run("python", program, *names).splitlines():
        name, lacking = line.split()
        about = name.startswith("fastserial.integrations.")
        assert about or lacking in name, line


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_install_and_import(place: Environment, extra: str) -> None:
    place.install(f"{wheel()}[{extra}]", f"torch=={TORCH}")
    place.run("python", "-c", "".join(f"import {module}\n" for module in EXTRAS[extra]))
