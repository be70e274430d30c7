"""What is tried in a guest that is an NFS server and its clients: prints a row of a table for each.

The files are asked afterwards on the server's own disk, by stock torch, byte for byte.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import (
    NAME,
    NBYTES,
    Child,
    Torn,
    held,
    kill_in_a_save,
    saves,
    states,
    stock_bytes,
    strays,
    torch,
)  # fmt: skip

import fastserial

SHARE = Path("/host-rw")
NFS = {"/n4": "NFS 4.2", "/n3": "NFS 3", "/nl": "NFS 3, nolock"}
LOCAL = {"/srv/x": "ext4", "/srv/xfs": "XFS"}
TWO = ("/n4 /nl", "/nl /n4", "/n3 /nl", "/n4 /n3")
_OTHER_HOST = "00000000-0000-4000-8000-000000000052"
_DICE = random.Random(52)
_numbers = iter(range(1, 1_000_000))


def shell(script: str) -> None:
    subprocess.run(["bash", "-c", script], check=True)


def server_path(path: str | os.PathLike[str]) -> Path:
    """Return where a file of a client is on the server's disk."""
    text = os.fspath(path)
    for client, disk in {"/small3/": "small/", "/small4.2/": "small/"}.items():
        text = text.replace(client, f"/srv/{disk}")
    for client in ("/squash3/", "/squash4.2/"):
        text = text.replace(client, "/srv/xfs/")
    for client in NFS:
        text = text.replace(f"{client}/", "/srv/x/", 1) if text.startswith(f"{client}/") else text
    return Path(text)


def folder(mount: str) -> Path:
    """Make a new folder that others may write to."""
    made = Path(mount) / f"case-{next(_numbers)}"
    made.mkdir()
    made.chmod(0o777)
    return made


def expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what}: {found!r}, not {wanted!r}")


def after_power_cut(path: Path) -> int:
    """Return the checkpoint that the server's disk would hold if its power were cut now."""
    disk = "x" if str(path).startswith("/srv/x/") else "xfs"
    shell(f"cp --sparse=always /run/{disk}.img /run/cut.img; mkdir -p /run/cut")
    shell(f"mount -o loop{',nouuid' * (disk == 'xfs')} /run/cut.img /run/cut")
    try:
        return held(Path("/run/cut") / path.relative_to(f"/srv/{disk}"))
    finally:
        shell("umount /run/cut; rm /run/cut.img")


def plain(mount: str, counts: Counter[str]) -> None:
    """Save to new and to existing paths, large and small, zip and legacy, and cut the power."""
    sizes: list[tuple[int, dict[str, Any]]]
    sizes = [(NBYTES, {}), (4_000, {}), (NBYTES, {"direct": True})]
    for nbytes, options in sizes:
        path = folder(mount) / NAME
        for _ in range(2):  # new, overwritten
            number = next(_numbers)
            done = Child(saves, str(path), number, 1, nbytes, options=options).ended()
            if "error" in done:
                raise AssertionError(f"save: {done}")
            expect(held(server_path(path)), number, "on the server")
            if "durable=1" in done["end"][0]:
                expect(after_power_cut(server_path(path)), number, "after a power cut")
                counts["durable, also after a power cut of the server"] += 1
            counts[f"stock's bytes ({done['end'][0]})"] += 1
        expect(strays(path.parent), [], "left over")
        shutil.rmtree(path.parent)


def _loads(say: Callable[..., None], path: str, number: int, nbytes: int) -> list[str]:
    wanted = states.make(number, nbytes)["tensors"]

    def same(found: Any) -> bool:
        return all(torch.equal(found[key], tensor) for key, tensor in wanted.items())

    done = []
    for name, load in {
        "torch.load": lambda: torch.load(path)["tensors"],
        "load(verify=True)": lambda: fastserial.load(path, verify=True)["tensors"],
        "mmap=True": lambda: torch.load(path, mmap=True)["tensors"],
        "load_into": lambda: _into(path, number, nbytes),
    }.items():
        Path("/proc/sys/vm/drop_caches").write_text("3")
        expect(same(load()), True, name)
        done.append(name)
    report = fastserial.verify(path)
    expect(report.ok, True, f"verify: {report}")
    return [*done, "verify"]


def _into(path: str, number: int, nbytes: int) -> Any:
    target = states.make(number + 1, nbytes)
    fastserial.load_into(target, path)
    return target["tensors"]


def loads(mount: str, counts: Counter[str]) -> None:
    """Load from the server, by every way."""
    path, number, nbytes = folder(mount) / NAME, next(_numbers), NBYTES
    server_path(path).write_bytes(stock_bytes(number, nbytes))
    done = Child(_loads, str(path), number, nbytes).ended()
    if "error" in done:
        raise AssertionError(f"load: {done}")
    counts.update(f"{name}: equal" for name in done["end"])
    shutil.rmtree(path.parent)


def _background(say: Callable[..., None], path: str, number: int) -> str:
    state = states.make(number, NBYTES)
    pending = fastserial.save_async(state, path)
    for tensor in state["tensors"].values():
        tensor.zero_()
    return str(pending.result(100))


def background(mount: str, counts: Counter[str]) -> None:
    """`save_async`, while the program changes the state."""
    path = folder(mount) / NAME
    for _ in range(2):
        number = next(_numbers)
        done = Child(_background, str(path), number).ended()
        if "error" in done:
            raise AssertionError(f"save_async: {done}")
        expect(held(server_path(path)), number, "on the server")
        counts["the state at the call"] += 1
    shutil.rmtree(path.parent)


def _train(say: Callable[..., None], where: str, last: int) -> int:
    model = torch.nn.Linear(1000, 1000)
    objects = {"model": model}
    with fastserial.Checkpointer(where, objects, keep=2) as checkpointer:
        first = checkpointer.resume()
        if first:
            expect(float(model.bias[0].detach()), float(first), "the bias resumed")
        for step in range(first + 1, last + 1):
            with torch.no_grad():
                model.bias.fill_(step)
            checkpointer.save(step)
            say(start=step)
    return first


def checkpointer(mount: str, counts: Counter[str]) -> None:
    """A `Checkpointer` that is killed and resumes."""
    where = folder(mount)
    killed = Child(_train, str(where), 1000)
    while killed.last("start") < 4 and "error" not in killed.wait_for("start"):
        killed._listen(1)
    killed.kill()
    reached = killed.last("start")
    done = Child(_train, str(where), reached + 3).ended()
    if "error" in done:
        raise AssertionError(f"Checkpointer: {done}")
    if not reached - 1 <= done["end"] <= reached + 1:
        raise AssertionError(f"killed in step {reached}, resumed at {done['end']}")
    counts["killed, resumed at its last checkpoint or the one before"] += 1
    expect(len([name for name in os.listdir(where) if name.endswith(".pt")]), 2, "files kept")
    shutil.rmtree(where)


def killed(mount: str, counts: Counter[str], *, stock: bool = False, trials: int = 6) -> None:
    """Kill a client process at a random moment of an overwriting save."""
    path = folder(mount) / NAME
    first = next(_numbers)
    Child(saves, str(path), first).ended()
    for _ in range(trials):
        number = next(_numbers)
        child = Child(saves, str(path), number, 1, stock=stock)
        kill_in_a_save(child, _DICE, 0.5)
        try:
            found = held(server_path(path))
        except Torn:
            if not stock:
                raise
            counts["torn"] += 1
            continue
        counts["new file" if found == number else "old file"] += 1
        if not stock:
            expect(found in (first, number), True, f"checkpoint {found}")
            first = found
    if not stock:
        counts["temporary files left, removed by the next save"] += len(strays(path.parent))
        done = Child(saves, str(path), next(_numbers)).ended()
        if "error" in done:
            raise AssertionError(f"the next save: {done}")
        expect(strays(path.parent), [], "left over after the next save")
    shutil.rmtree(path.parent)


_LONG = 16 << 20  # bytes of a save that takes about a second


def two_clients(mounts: str, counts: Counter[str], *, trials: int = 6) -> None:
    """One path, saved by two clients at once, as of two hosts; the second is killed in its save."""
    one, two = mounts.split()
    where = folder(one)
    for trial in range(trials):
        first, second = next(_numbers), next(_numbers)
        start, go = f"/run/go-{first}", f"/run/go-{second}"
        theirs = f"{two}/{where.name}/{NAME}"
        options = {"nbytes": _LONG, "go": go}
        other = Child(saves, theirs, second, host=_OTHER_HOST, options=options)
        mine = Child(saves, str(where / NAME), first, options={**options, "go": start})
        other.wait_for("ready")
        mine.wait_for("ready")
        Path(start).touch()
        mine.wait_for("start")
        time.sleep(_DICE.uniform(0, 0.4))
        Path(go).touch()
        kill_in_a_save(other, _DICE, 0.5)
        _count_the_living(mine, trial, where, (first, second), counts)
    left = strays(where)
    counts["temporary files of the killed client"] += len(left)
    days = time.time() - 3 * 86_400
    for name in left:
        os.utime(server_path(where / name), (days, days))
    time.sleep(1)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    Child(saves, str(where / NAME), next(_numbers)).ended()
    expect(strays(where), [], "left over, three days later")
    shutil.rmtree(where)


def _count_the_living(
    mine: Child, trial: int, where: Path, numbers: tuple[int, int], counts: Counter[str]
) -> None:
    """Wait for the save of the client that lives, and ask what the path holds."""
    done = mine.ended()
    if "error" in done:
        raise AssertionError(f"trial {trial}, the client that lives: {done}")
    try:
        found = held(server_path(where / NAME))
    except Torn as error:
        raise Torn(f"trial {trial}, after {done['end']}: {error}") from error
    expect(found in numbers, True, f"checkpoint {found}")
    counts[f"the {'living' if found == numbers[0] else 'killed'} client's file"] += 1


def restarted(mount: str, counts: Counter[str]) -> None:
    """Stop the server in the middle of a save and start it again, twice."""
    path = folder(mount) / NAME
    for pause in (0.05, 0.4):
        number = next(_numbers)
        child = Child(saves, str(path), number)
        child.wait_for("start")
        time.sleep(pause)
        shell("rpc.nfsd 0; sleep 2; rpc.nfsd -G 15 -L 60 4")
        done = child.ended()
        if "error" in done:
            raise AssertionError(f"save: {done}")
        expect(held(server_path(path)), number, "on the server")
        counts[f"saved ({done['end'][0]})"] += 1
    shutil.rmtree(path.parent)


def _old_or_new(
    child: Child, path: Path, first: int, number: int, counts: Counter[str], what: str
) -> int:
    """Wait for a save, count how it ended, and return which checkpoint is there."""
    done = child.ended()
    found = held(server_path(path))
    if "error" in done:
        expect(found in (first, number), True, f"checkpoint {found} after {done}")
        errno = done["errno"]
        error = os.strerror(errno) if errno else done["error"]
        counts[f"{what}: {error}, {'old' if found == first else 'new'} file"] += 1
    else:
        expect(found, number, f"on the server after {done}")
        counts[f"{what}: saved ({done['end'][0]})"] += 1
    return found


def withdrawn(mount: str, counts: Counter[str]) -> None:
    """Withdraw the export in the middle of a save, for 3 seconds and for 12.

    The server of NFS 3 does not hear then that a process ended: it keeps the lock of its file.
    """
    path = folder(mount) / NAME
    first = next(_numbers)
    Child(saves, str(path), first).ended()
    for retry, seconds in ((60, 3), (2, 12)):
        number = next(_numbers)
        child = Child(saves, str(path), number, 1, options={"retry_seconds": retry})
        child.wait_for("start")
        shell("exportfs -ua; exportfs -f")
        time.sleep(seconds)
        shell("exportfs -ra; exportfs -f")
        first = _old_or_new(child, path, first, number, counts, f"{seconds} s")
    done = Child(saves, str(path), next(_numbers)).ended()
    expect(done.get("error"), None, f"the next save: {done}")
    left = strays(path.parent)
    for name in left:
        expect(_is_locked(path.parent / name), True, f"left over after the next save: {name}")
        os.utime(path.parent / name, (1, time.time() - 2 * 86400))
    counts["temporary files left, removed after a day"] += len(left)
    Child(saves, str(path), next(_numbers)).ended()
    expect(strays(path.parent), [], "left over after a day")
    shutil.rmtree(path.parent)


def _is_locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def removed(mount: str, counts: Counter[str]) -> None:
    """Remove the new file on the server in the middle of a save: its handle is stale (ESTALE)."""
    path = folder(mount) / NAME
    first = next(_numbers)
    Child(saves, str(path), first).ended()
    for _ in range(4):
        number = next(_numbers)
        child = Child(saves, str(path), number, 1, _LONG)
        child.wait_for("start")
        for _ in range(500):
            new = [name for name in strays(server_path(path.parent)) if "fastserial" in name]
            if new:
                break
            time.sleep(0.005)
        time.sleep(_DICE.uniform(0, 0.2))
        for name in new:
            server_path(path.parent / name).unlink(missing_ok=True)
        first = _old_or_new(child, path, first, number, counts, "removed")
    Child(saves, str(path), next(_numbers)).ended()
    expect(strays(path.parent), [], "left over after the next save")
    shutil.rmtree(path.parent)


def replaced(mounts: str, counts: Counter[str]) -> None:
    """Load again and again while another client replaces the file."""
    one, two = mounts.split()
    where = folder(one)
    Child(saves, str(where / NAME), next(_numbers)).ended()
    writer = Child(saves, f"{two}/{where.name}/{NAME}", next(_numbers) + 10_000, 8)
    while not any("end" in line or "error" in line for line in writer.said):
        done = Child(_read, str(where / NAME)).ended()
        counts[done.get("end") or f"an error: {done['error']}, {done['errno']}"] += 1
        writer._listen(0)
    expect("error" in writer.ended(), False, f"the writer: {writer.said[-1]}")
    shutil.rmtree(where)


def _read(say: Callable[..., None], path: str) -> str:
    found = torch.load(path)
    wanted = states.make(found["number"], found["nbytes"])["tensors"]
    same = all(torch.equal(found["tensors"][key], tensor) for key, tensor in wanted.items())
    return "one whole checkpoint" if same else "A MIXTURE"


_OTHER = 1000


def squashed(mount: str, counts: Counter[str]) -> None:
    """Root is nobody on the server (`root_squash`): every kind of file and folder, beside stock."""
    for label, mode, owner, file_mode in (
        ("a folder of another user", 0o755, _OTHER, None),
        ("a new file", 0o777, 0, None),
        ("another user's file, writable for all", 0o777, _OTHER, 0o666),
        ("another user's file, read-only", 0o777, _OTHER, 0o644),
    ):
        ends, how = [], ""
        for stock in (True, False):
            disk = Path("/srv/xfs") / f"squash-{next(_numbers)}"
            disk.mkdir()
            first, number = next(_numbers), next(_numbers)
            if file_mode is not None:
                (disk / NAME).write_bytes(stock_bytes(first))
                (disk / NAME).chmod(file_mode)
                os.chown(disk / NAME, owner, owner)
            os.chown(disk, owner, owner)
            disk.chmod(mode)
            done = Child(saves, f"{mount}/{disk.name}/{NAME}", number, stock=stock).ended()
            there = held(disk / NAME) if (disk / NAME).exists() else 0
            status = (disk / NAME).stat() if there else None
            rights = (status.st_uid, status.st_mode & 0o7777) if status else None
            what = {0: "no file", first: "old file", number: "new file"}[there]
            ends.append((done.get("error", "saved") == "saved", what, rights))
            expect(strays(disk), [], f"left over ({label})")
            if not stock:
                how = f"errno {done['errno']}" if "error" in done else done["end"][0]
        expect(ends[1], ends[0], f"{label}, beside stock")
        counts[f"{label}: as stock, {ends[1][1]} ({how})"] += 1


def full(mount: str, counts: Counter[str]) -> None:
    """A server whose disk is full: an old file of 5 MiB, new ones of 30 and 18."""
    path = folder(mount) / NAME
    first = next(_numbers)
    Child(saves, str(path), first).ended()
    sizes: list[tuple[int, dict[str, Any]]]
    sizes = [(30 << 20, {}), (30 << 20, {"direct": True}), (18 << 20, {})]
    for nbytes, options in sizes:
        done = Child(saves, str(path), next(_numbers), 1, nbytes, options=options).ended()
        expect(done.get("errno"), 28, f"a full disk: {done}")
        expect(held(server_path(path)), first, "on the server")
        expect(strays(path.parent), [], "left over")
        counts["ENOSPC, old file"] += 1
    shutil.rmtree(path.parent)


def overlay(_: str, counts: Counter[str]) -> None:
    """overlayfs on ext4, whose lower file is replaced."""
    shell("mkdir -p /srv/x/o/{l,u,w,m}")
    first = next(_numbers)
    Path(f"/srv/x/o/l/{NAME}").write_bytes(stock_bytes(first))
    shell("cd /srv/x/o; mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w m")
    try:
        killed("/srv/x/o/m", counts, trials=3)
        number = next(_numbers)
        done = Child(saves, f"/srv/x/o/m/{NAME}", number).ended()
        expect("error" in done, False, str(done))
        expect((held(f"/srv/x/o/m/{NAME}"), held(f"/srv/x/o/l/{NAME}")), (number, first), "layers")
        counts[f"a lower file replaced ({done['end'][0]})"] += 1
    finally:
        shell("umount /srv/x/o/m; rm -r /srv/x/o")


def _ask(word: str, seconds: float) -> str:
    """Ask the other guest, or the host, for something, and return its answer."""
    answer = SHARE / f"{word}.answer"
    (SHARE / f"{word}.ask").write_text(word)
    end = time.monotonic() + seconds
    while not answer.exists():
        if time.monotonic() > end:
            raise AssertionError(f"no answer to {word!r} within {seconds} s")
        time.sleep(0.02)
    time.sleep(0.02)
    return answer.read_text()


def two_hosts(mount: str, counts: Counter[str], *, trials: int = 4) -> None:
    """As `two_clients`, and the second is another guest, by its own mount."""
    where = folder("/srv/x")
    for trial in range(trials):
        first, second = next(_numbers), next(_numbers)
        start = f"/run/go-{first}"
        options = {"nbytes": _LONG, "go": start}
        mine = Child(saves, f"/n4/{where.name}/{NAME}", first, options=options)
        mine.wait_for("ready")
        _ask(f"save-{mount[1:]}-{where.name}-{second}-{_DICE.randrange(500)}", 600)
        Path(start).touch()
        mine.wait_for("start")
        time.sleep(_DICE.uniform(0, 0.4))
        (SHARE / f"go-{second}").touch()
        _count_the_living(mine, trial, where, (first, second), counts)
    time.sleep(1)  # the other host's last one is killed by now
    counts["temporary files of the other host"] += len(strays(where))
    shutil.rmtree(where)


def guest_killed(mount: str, counts: Counter[str]) -> None:
    """The power of the client is cut in the middle of its saves."""
    where = folder("/srv/x")
    first = next(_numbers)
    (where / NAME).write_bytes(stock_bytes(first))
    found = _ask(f"die-{mount[1:]}-{where.name}-{next(_numbers) + 20_000}", 500)
    returned, begun = map(int, found.split())
    number = held(where / NAME)
    expect((returned or first) <= number <= begun, True, f"{number}, of {returned} to {begun}")
    counts["last returned save" if number == (returned or first) else "a newer one, whole"] += 1
    counts["temporary files left"] += len(strays(where))
    done = Child(saves, f"{mount}/{where.name}/{NAME}", begun + 1).ended()
    expect(done.get("error"), None, f"the next save, of another host: {done}")
    expect(held(where / NAME), begun + 1, "the next save")
    shutil.rmtree(where)


def stock_killed(mount: str, counts: Counter[str]) -> None:
    """The control: the same kills, of stock torch."""
    killed(mount, counts, stock=True)
    if not counts["torn"]:
        raise AssertionError(f"no kill hit a save: {dict(counts)}")


Case = tuple[str, Callable[..., None], list[str]]
CASES: list[Case] = [
    ("two clients, one path; one killed", two_clients, [*TWO]),
    ("two hosts, one path; one killed", two_hosts, ["/n4", "/nl"]),
    ("the client's power is cut in its saves", guest_killed, ["/n4"]),
    ("the server restarts in a save", restarted, [*NFS]),
    ("the export is withdrawn in a save", withdrawn, [*NFS]),
    ("the new file is removed on the server in a save", removed, [*NFS]),
    ("`root_squash`", squashed, ["/squash3", "/squash4.2"]),
    ("the disk of the server is full", full, ["/small3", "/small4.2"]),
    ("`kill -9` in an overwriting save", killed, [*NFS, *LOCAL]),
    ("the same with stock torch (control)", stock_killed, ["/n4"]),
    ("a load while another client replaces the file", replaced, ["/n4 /n3", "/n3 /n4"]),
    ("new and overwritten, 5 MiB and 4 KB", plain, [*NFS, *LOCAL]),
    ("every way of loading", loads, [*NFS, *LOCAL]),
    ("`save_async`", background, [*NFS, *LOCAL]),
    ("`Checkpointer`, killed and resumed", checkpointer, [*NFS, *LOCAL]),
    ("overlayfs on ext4", overlay, ["/srv/x"]),
    ("the client's power is cut in its saves", guest_killed, ["/nl"]),
]


def name_of(mounts: str) -> str:
    """Return what the table says of mounts."""
    named = {**NFS, **LOCAL}
    for version in ("3", "4.2"):
        named |= {f"/small{version}": f"NFS {version}", f"/squash{version}": f"NFS {version}"}
    return " and ".join(named[mount] for mount in mounts.split())


def main(words: list[str]) -> int:
    """Run the cases whose name or function has one of these words; all without any."""
    torch.set_num_threads(1)
    failures = 0
    for label, case, mounts in CASES:
        if words and not any(word in label or word == case.__name__ for word in words):
            continue
        for mount in mounts:
            counts: Counter[str] = Counter()
            began = time.monotonic()
            try:
                case(mount, counts)
                outcome = "; ".join(f"{count} {what}" for what, count in counts.items() if count)
            except Exception as error:
                failures += 1
                traceback.print_exc()
                outcome = f"FAILED: {type(error).__name__}: {error}"
            row = f"| {label} | {name_of(mount)} | {outcome} |"
            with (SHARE / "table.md").open("a", encoding="utf-8") as table:
                table.write(row.replace("\n", " ") + "\n")
            print(f"{row} {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
