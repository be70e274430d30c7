"""Boots Linux under software emulation, without KVM, with this machine's files.

A guest has Debian's kernel, the files of this machine below an overlay in memory (what it writes is
gone at its end), and `/host-rw`, a folder that it shares with the host and with other guests.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent
_MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "nfs", "nfsv3", "nfsv4", "nfsd", "loop",
    "virtio_net", "ext4", "xfs", "crc32c_generic",
)  # fmt: skip
_SYSTEM = ("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-nographic")


class Kernel:
    """Debian's kernel and a first file system in memory, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "initrd.gz").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._fetch()
            self._build()
        (self.image,) = (folder / "k/boot").glob("vmlinuz-*")
        self.initrd = folder / "initrd.gz"
        self.version = self.image.name.removeprefix("vmlinuz-")

    def _shell(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self._folder, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def _fetch(self) -> None:
        self._shell(
            "package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/{print $2; exit}')\n"
            'apt-get download -qq "$package"; dpkg -x "$package"_*.deb k; rm -f "$package"_*.deb'
        )

    def _build(self) -> None:
        version = next((self._folder / "k/lib/modules").iterdir()).name
        root = self._folder / "root"
        for name in ("bin", "proc", "sys", "dev", "m"):
            (root / name).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, root / "bin/busybox")
        shutil.copy(HERE / "init", root / "init")
        (root / "init").chmod(0o755)
        self._shell(f"/sbin/depmod -b k {version} 2>/dev/null")
        modules: dict[str, None] = {}  # in order
        for name in _MODULES:
            listed = self._shell(f"/sbin/modprobe -d k -S {version} --show-depends {name} || true")
            for line in listed.splitlines():
                if line.startswith("insmod"):
                    modules[line.split()[1]] = None
        for module in modules:
            shutil.copy(self._folder / module, root / "m")
        (root / "list").write_text("".join(f"{Path(module).name}\n" for module in modules))
        self._shell("cd root; find . | cpio -o -H newc --quiet | gzip -1 > ../initrd.new")
        (self._folder / "initrd.new").rename(self._folder / "initrd.gz")


class Guest:
    """A running guest. Its console is in `NAME.log` of the shared folder.

    Args:
        kernel: what it boots.
        share: the folder that it sees as `/host-rw`.
        name: of its files there.
        script: what bash runs in it, as root.
        address: its own, on a network of all guests that share a port; ending in .1 for the first.
        port: of this machine, of that network.
    """

    def __init__(
        self,
        kernel: Kernel,
        share: Path,
        name: str,
        script: str,
        *,
        address: str,
        port: int,
        memory: str,
        processors: int = 2,
    ) -> None:
        path = "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root"
        (share / f"{name}.sh").write_text(f"{path}; cd /host-rw\n{script}\n")
        self.log = share / f"{name}.log"
        end = f"listen=127.0.0.1:{port}" if address.endswith(".1") else f"connect=127.0.0.1:{port}"
        hardware = f"02:00:00:00:00:{int(address.rsplit('.', 1)[1]):02x}"
        words = [
            "qemu-system-x86_64", *_SYSTEM, "-no-reboot", "-m", memory, "-smp", str(processors),
            "-kernel", str(kernel.image), "-initrd", str(kernel.initrd),
            "-append", f"console=ttyS0 quiet panic=-1 SCRIPT={name}.sh ADDRESS={address}",
            "-virtfs",
            "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
            "-virtfs", f"local,path={share},mount_tag=share,security_model=none",
            "-nic", "none", "-netdev", f"socket,id=n,{end}",
            "-device", f"virtio-net-pci,netdev=n,mac={hardware}",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def is_alive(self) -> bool:
        """Whether it has neither ended nor been killed."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Take its power away."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long; return whether its script succeeded."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        return "guest: exit 0" in self.log.read_text(errors="replace")


def wait_for(path: Path, guest: Guest, seconds: float) -> bool:
    """Wait until a file is there; False if the guest ended before, or after that many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if not guest.is_alive() or time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def command(*words: object) -> str:
    """Return a line for a shell."""
    return shlex.join(map(str, words))
