# /// script
# dependencies = ["nox>=2024.10.9"]
# ///
"""Sessions: `nox -l` lists them. `nox -s tests` is what CI and the README run."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests", "lint"]
nox.options.error_on_missing_interpreters = False

TORCH = "2.13.0"
RELEASES = [
    "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
]  # fmt: skip
# What depends on the torch release: patches, byte identity, files exchanged with stock torch.
RELEASE_TESTS = [
    "tests/test_patchset.py",
    "tests/test_patching.py",
    "tests/test_identity.py",
    "tests/compat",
]


PARALLEL = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]


def install(session: nox.Session, torch: str, extras: str) -> None:
    """Install one torch, then this tree as a wheel, as users get it."""
    session.install(f"torch=={torch}")
    session.install(f".[{extras}]", f"torch=={torch}")


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite against torch 2.13.0."""
    install(session, TORCH, "test")
    session.run("pytest", *(session.posargs or [*PARALLEL, "tests"]))


@nox.session
@nox.parametrize("torch", RELEASES)
def patches(session: nox.Session, torch: str) -> None:
    """Patches and byte identity against one torch release (about 5 GB, removed after)."""
    install(session, torch, "test")
    session.run("fastserial", "patches", "check")
    session.run("pytest", *(session.posargs or [*PARALLEL, *RELEASE_TESTS]))
    if torch != TORCH:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def python(session: nox.Session) -> None:
    """The suite on each Python that is there."""
    install(session, TORCH, "test")
    session.run("pytest", *(session.posargs or [*PARALLEL, "tests"]))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and strict types."""
    session.install("ruff>=0.14", "mypy>=1.18", "types-tqdm", "nox", "tomli")
    install(session, TORCH, "bench,test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def demo(session: nox.Session) -> None:
    """Save and load a model of about 1 GB with stock torch and with fastserial, and compare."""
    install(session, TORCH, "bench")
    folder = Path(session.create_tmp()) / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    session.run("fastserial", "demo", "--folder", str(folder), *session.posargs)
