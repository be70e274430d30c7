# /// script
# dependencies = ["nox>=2024.10.9"]
# ///
"""Sessions: `nox -l` lists them. `nox -s tests` is what CI and the README run."""

from __future__ import annotations

import ctypes.util
import os
import shutil
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint"]
nox.options.error_on_missing_interpreters = False

TORCH = "2.13.0"
RELEASES = [
    "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0",
    "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
]  # fmt: skip
# What depends on the torch release: patches, byte identity, files exchanged with stock torch.
RELEASE_TESTS = [
    "tests/patching/test_patches.py",
    "tests/patching/test_install.py",
    "tests/saving/test_identity.py",
    "tests/loading/test_load.py",
    "tests/loading/test_load_damaged.py",
    "tests/loading/test_load_files.py",
    "tests/loading/test_load_forms.py",
    "tests/checkpoints/test_load_into.py",
    "tests/checkpoints/test_open.py",
    "tests/loading/test_prefetch.py",
    "tests/loading/test_unpickler.py",
    "tests/compat",
]


# One more than cores: tests wait for disks and for processes. 2 cores: 8 minutes instead of 10.
WORKERS = min(len(os.sched_getaffinity(0)) + 1, 8)
PARALLEL = ["-n", str(WORKERS), "--dist", "worksteal"]


def install(session: nox.Session, torch: str, extras: str) -> None:
    """Install one torch, then this tree as a wheel, as users get it."""
    session.install(f"torch=={torch}")
    session.install(f".[{extras}]", f"torch=={torch}")


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite against torch 2.13.0."""
    install(session, TORCH, "test")
    session.run("pytest", *(session.posargs or [*PARALLEL, "tests"]))


def install_packages(session: nox.Session, *packages: str) -> None:
    """Install Debian packages where we may; tests that miss one say so."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        session.run("apt-get", "update", "-qq", external=True, silent=True)
        session.run("apt-get", "install", "-qq", "-y", *packages, external=True, silent=True)
    else:
        session.warn(f"not root: what needs {', '.join(packages)} may be skipped")


@nox.session
def faults(session: nox.Session) -> None:
    """Kills, power cuts, failing calls, full disks (root): docs/internals/fault-injection.md."""
    tools = {"strace": "strace", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
    tools |= {"bindfs": "bindfs", "gcc": "gcc", "mkfs.ext4": "e2fsprogs", "fusermount": "fuse"}
    missing = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if ctypes.util.find_library("fuse") is None:
        missing.append("libfuse2")
    if missing:
        install_packages(session, *missing)
    install(session, TORCH, "test")
    session.install("atheris")
    table = Path(session.create_tmp()) / "faults.md"
    table.unlink(missing_ok=True)
    session.run(
        "pytest",
        *(session.posargs or [*PARALLEL, "tests/faults", "tests/overlap", "tests/training"]),
        env={"FASTSERIAL_FAULTS": "full", "FASTSERIAL_FAULTS_TABLE": str(table)},
    )
    if table.exists():
        session.log("\n" + table.read_text())
    if not session.posargs:
        for parser in ("zip", "legacy", "pickle", "safetensors", "dcp"):
            session.run("python", "tests/faults/fuzz_parsers.py", parser, "-max_total_time=600")


GUEST = [
    "qemu-system-x86", "seabios", "busybox-static", "kmod", "cpio", "rpcbind", "nfs-common",
    "nfs-kernel-server", "xfsprogs", "e2fsprogs",
]  # fmt: skip


@nox.session
def guest(session: nox.Session) -> None:
    """NFS for real, and an older kernel: in emulated machines (root, Debian; half an hour)."""
    install_packages(session, *GUEST)
    install(session, TORCH, "test")
    cache = Path(session.create_tmp()).resolve() / "guest"
    words = ("tests/guest/run.py", "--cache", str(cache), *session.posargs)
    session.run("python", "-u", *words)


@nox.session
def distributed(session: nox.Session) -> None:
    """One file from many ranks: identity, failures, kills, memory, in their long forms."""
    install(session, TORCH, "test")
    session.install("expecttest")  # torch's own tests want it
    default = ["tests/distributed", "tests/training/test_checkpointer_ranks.py"]
    session.run("pytest", *(session.posargs or default), env={"FASTSERIAL_DISTRIBUTED": "full"})


@nox.session
def deepspeed(session: nox.Session) -> None:
    """DeepSpeed for real, on CPU: its aio op (compiled here), writer, checkpoints, resuming."""
    # Its header: the library alone comes with fio, and DeepSpeed cannot be compiled against it.
    if not Path("/usr/include/libaio.h").exists() or shutil.which("g++") is None:
        install_packages(session, "libaio-dev", "g++")
    install(session, TORCH, "test,deepspeed")
    session.install("ninja", "transformers")
    # A folder of its own: a build that was killed anywhere leaves a lock on which all others wait.
    built = Path(session.virtualenv.location).resolve() / "torch_extensions"
    for lock in built.rglob("lock"):
        lock.unlink()
    cpu = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(built)}
    build = (
        "from deepspeed.accelerator import get_accelerator\n"
        "for op in ('AsyncIOBuilder', 'ShareMemCommBuilder'):\n"
        "    get_accelerator().create_op_builder(op).load()\n"
    )
    session.run("python", "-c", build, env=cpu)
    default = [
        *PARALLEL,
        "tests/deepspeed",
        "tests/engines/test_engines.py",
        "tests/integrations/test_fastpersist.py",
        "tests/bench/test_scripts.py::test_scripts[deepspeed_save_model]",
    ]
    session.run("pytest", *(session.posargs or default), env=cpu)
    if not session.posargs:
        page = "tests/docs/test_pages.py::test_blocks_run[deepspeed]"
        session.run("pytest", page, env={**cpu, "FASTSERIAL_DOCS": "1"})


NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))  # some sandboxes have one


@nox.session
def gpu(session: nox.Session) -> None:
    """On a CUDA GPU: identity, order of streams, transfer types, benchmarks (docs/guide/gpu.md).

    `nox -s gpu -- prepare` downloads and installs what `nox -R -s gpu` then runs without network.
    """
    prepare = session.posargs == ["prepare"]
    if not (prepare or any(map(Path.exists, NVIDIA))):
        session.skip(f"no GPU here: {NVIDIA[0]} is not there")
    install(session, TORCH, "bench,test,plot,deepspeed")
    session.install("fastsafetensors")  # a peer of benchmarks/load.py
    if prepare:
        return
    folder = Path(session.create_tmp()) / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    if session.posargs:
        session.run("pytest", "-n", "4", *session.posargs)
        return
    failed: list[str] = []

    def step(*words: str, **more: Any) -> None:
        """Run a command; one that fails does not keep the others from running."""
        try:
            session.run(*words, **more)
        except CommandFailed:
            failed.append(" ".join(words[:3]))

    def bench(name: str, *words: str) -> None:
        results = ("--folder", str(folder), "--json", str(folder / f"{name}.json"))
        step("python", f"benchmarks/{name}.py", *results, *words)

    step("pytest", "-n", "4", "tests/gpu", "tests/engines/test_cufile.py")
    step("fastserial", "doctor", str(folder), success_codes=[0, 1])
    bench("load", "--gpu", "--size", "2GiB", "--runs", "3", "--temperature", "cold")
    model = ("--model", "llama3-1b", "--half", "--runs", "3", "--no-loose", "--zipfile")
    bench("torch_save_model", "--gpu", *model)
    bench("overlap", "--model", "medium", "--device", "cuda", "--runs", "1")
    sweep = "--block-size 2MiB,8MiB --queue-depth 6 --threads 6 --runs 2 --size 512MiB".split()
    bench("sweep", "--plot", str(folder / "sweep.png"), *sweep)
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        session.warn("compute-sanitizer is not installed: memory accesses are not checked")
    else:
        # it takes calls of the driver for errors that torch makes to see what there is
        checks = (checker, "--report-api-errors", "no", "--error-exitcode", "9")
        order = ("python", "-m", "pytest", "-q", "tests/gpu/test_gpu_order.py")
        step(*checks, *order, external=True)
    if failed:
        session.error(f"failed: {'; '.join(failed)}")


@nox.session
def integrations(session: nox.Session) -> None:
    """Lightning, Hugging Face's Trainer, accelerate: killed and resumed.

    `-- short`, for CI: one process only, and without the controls.
    """
    install(session, TORCH, "test,lightning,transformers")
    session.install("--no-deps", "nvidia-resiliency-ext")  # its tools for GPUs are not needed
    session.install("moto[server]", "boto3")  # an S3 server
    session.install("optuna")  # the Trainer's hyperparameter search
    default = [*PARALLEL, "tests/integrations"]
    if session.posargs == ["short"]:
        long = "ddp or fsdp2 or two_ranks"
        session.run("pytest", *default, "-k", f"not ({long})")
        return
    session.run("pytest", *(session.posargs or default))
    if not session.posargs:
        pages = [
            f"tests/docs/test_pages.py::test_blocks_run[{page}]"
            for page in ("frameworks", "recipes")
        ]
        session.run("pytest", *pages, env={"FASTSERIAL_DOCS": "1"})


# Frameworks whose source distributions have the tests of their checkpoints.
SUITES = ["accelerate", "pytorch-ignite", "skorch"]
SUITES_NEED = ["parameterized", "torchvision", "flaky", "pandas", "dill"]  # what these tests import


@nox.session
def frameworks(session: nox.Session) -> None:
    """Frameworks' own tests of their checkpoints, stock beside fastserial installed."""
    install(session, TORCH, "test")
    session.install(*SUITES, *SUITES_NEED, f"torch=={TORCH}")
    sources = Path(session.create_tmp()).resolve() / "sdists"
    shutil.rmtree(sources, ignore_errors=True)
    for name in SUITES:
        installed = f"import importlib.metadata as m; print(m.version({name!r}))"
        version = str(session.run("python", "-c", installed, silent=True)).strip()
        plain = ("--no-deps", "--no-binary", ":all:", "-d", str(sources))
        session.run("python", "-m", "pip", "download", "-q", *plain, f"{name}=={version}")
    env = {"FASTSERIAL_SDISTS": str(sources)}
    session.run("pytest", "-rP", *(session.posargs or ["tests/framework_suites"]), env=env)


@nox.session
@nox.parametrize("torch", RELEASES)
def patches(session: nox.Session, torch: str) -> None:
    """Patches and byte identity against one torch release (about 5 GB, removed after)."""
    install(session, torch, "test")
    session.run("fastserial", "patches", "check")
    session.run("pytest", *(session.posargs or [*PARALLEL, *RELEASE_TESTS]))
    if torch != TORCH:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
@nox.parametrize(("ours", "stock"), [("2.15.0", "2.6.0"), ("2.6.0", "2.15.0")])
def compat(session: nox.Session, ours: str, stock: str) -> None:
    """Files exchanged between this tree on one torch release and stock torch of another (10 GB)."""
    other = Path(session.create_tmp()).resolve() / "stock"
    session.run("python", "-m", "venv", "--clear", str(other))
    python = str(other / "bin" / "python")
    packages = (f"torch=={stock}", "numpy", "safetensors", "dill", "fsspec", "packaging")
    session.run(python, "-m", "pip", "install", "-q", *packages, external=True)
    install(session, ours, "test")
    session.run("pytest", "tests/compat", env={"FASTSERIAL_STOCK_PYTHON": python})
    for folder in (str(other), session.virtualenv.location):
        shutil.rmtree(folder, ignore_errors=True)


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def python(session: nox.Session) -> None:
    """The suite on each Python that is there."""
    install(session, TORCH, "test")
    session.run("pytest", *(session.posargs or [*PARALLEL, "tests"]))


# What depends on other packages than torch: the command line, checksums, their file formats.
LOWEST_TESTS = [
    "tests/cli",
    "tests/test_config.py",
    "tests/patching",
    "tests/saving/test_writer.py",
    "tests/checkpoints/test_verification.py",
    "tests/checkpoints/test_inspection.py",
    "tests/checkpoints/test_convert.py",
    "tests/integrations/test_safetensors.py",
]
FRAMEWORK_TESTS = [
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_transformers.py",
]


@nox.session
@nox.parametrize("part", ["package", "frameworks"])
def lowest(session: nox.Session, part: str) -> None:
    """The lowest version of each dependency that pyproject.toml allows (of torch: `patches`)."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    package = [*project["dependencies"], *extras["test"]]
    frameworks = [*extras["lightning"], *extras["transformers"]]
    pinned, tests = (package, LOWEST_TESTS) if part == "package" else (frameworks, FRAMEWORK_TESTS)
    exact = [word.replace(">=", "==") for word in pinned if not word.startswith("torch>")]
    install(session, TORCH, "test")
    session.install(f"torch=={TORCH}", *exact)
    # the newest packages beside them have deprecated what the lowest use
    deprecated = ("-W", "default::DeprecationWarning", "-W", "default::PendingDeprecationWarning")
    session.run("pytest", *deprecated, *(session.posargs or [*PARALLEL, *tests]))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and strict types."""
    project = nox.project.load_toml("pyproject.toml")
    session.install(*nox.project.dependency_groups(project, "lint"), "nox", "tomli")
    install(session, TORCH, "bench,test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("mypy", "--config-file", "tests/mypy.ini")
    session.run("lint-imports")


@nox.session
def coverage(session: nox.Session) -> None:
    """The suite with a count of the lines and branches it runs, in all its processes."""
    session.install(f"torch=={TORCH}")
    session.install("-e", ".[test]", f"torch=={TORCH}", "coverage>=7.10")
    session.run("coverage", "erase")
    # strace's injections would hit the files that coverage itself writes
    default = [*PARALLEL, "tests", "--ignore=tests/faults/test_injection.py"]
    session.run("coverage", "run", "-m", "pytest", *(session.posargs or default))
    session.run("coverage", "combine", "-q")
    session.run("coverage", "report")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Every script of benchmarks/, into benchmarks/results/: `-- --folder D [--short]`."""
    install(session, TORCH, "bench,plot")
    session.run("python", "benchmarks/all.py", *session.posargs)


TORCH_SOURCE = "https://github.com/pytorch/pytorch"
# torch's own tests of what we stand in for; the second line is what the first imports.
TORCH_TESTS = [
    "test/test_serialization.py", "test/distributed/checkpoint",
    "test/serialization/serialization_data.pt",
]  # fmt: skip


@nox.session
def torch_suite(session: nox.Session) -> None:
    """torch's own tests of serialization and DCP, with stock torch and with fastserial installed.

    `FASTSERIAL_TORCH_SOURCE` names a checkout of the release, if there is one; else it is fetched.
    """
    install(session, TORCH, "test")
    session.install("expecttest", "zstandard")
    source = os.environ.get("FASTSERIAL_TORCH_SOURCE")
    if source is None:
        source = str(Path(session.create_tmp()).resolve() / f"pytorch-{TORCH}")
        if not Path(source).exists():
            sparse = ("--depth=1", "--filter=blob:none", "--sparse", f"--branch=v{TORCH}")
            session.run("git", "clone", *sparse, TORCH_SOURCE, source, external=True)
            only = ("sparse-checkout", "set", "--no-cone", *TORCH_TESTS)
            session.run("git", "-C", source, *only, external=True)
    env = {"FASTSERIAL_TORCH_SOURCE": source}
    session.run("pytest", "-rP", *(session.posargs or ["tests/torch_suite"]), env=env)


@nox.session
def demo(session: nox.Session) -> None:
    """Save and load a model of about 1 GB with stock torch and with fastserial, and compare."""
    session.install(f"torch=={TORCH}")
    session.install(".", f"torch=={TORCH}")
    folder = Path(session.create_tmp()) / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    session.run("fastserial", "demo", "--folder", str(folder), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site of docs/, where warnings are errors, and every block of code that claims to run."""
    install(session, TORCH, "test")
    # Material for MkDocs gets repairs until May 2027; its successor reads the same settings.
    session.install("mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings-python>=2,<3")
    # not with -q, which hides warnings from `strict`
    session.run("mkdocs", "build", "-f", "docs/site/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("pytest", "tests/docs", *session.posargs, env={"FASTSERIAL_DOCS": "1"})


@nox.session
def package(session: nox.Session) -> None:
    """Wheel and sdist: what is in them, and installed in empty environments (some minutes)."""
    session.install("build", "twine", "packaging", "tomli", "pytest>=8", "pytest-timeout>=2.3")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    session.run(
        "pytest",
        "--confcutdir=tests/package",
        "--timeout=1800",
        "tests/package",
        *session.posargs,
        env={"FASTSERIAL_PACKAGE": str(Path("dist").resolve()), "FASTSERIAL_TORCH": TORCH},
    )
