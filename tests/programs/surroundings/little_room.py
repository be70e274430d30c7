"""Save or load where little is left: `FOLDER SAVE|LOAD MiB-of-address-space:descriptors ...`.

0 is no limit. Each case is tried twice in a process of its own; what the report says is printed.
"""

import os
import resource
import sys
import traceback

import torch

import fastserial

folder, way, *cases = sys.argv[1:]
# more than is read ahead: what threads take is missing for storages then
STATE = {f"t{i}": torch.full(((40 if way == "LOAD" else 4) << 18,), float(i)) for i in range(10)}


def limit(room: int, descriptors: int) -> None:
    if room:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (room << 20),) * 2)
    if descriptors:
        last = os.dup(0)
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + descriptors,) * 2)


def work(case: str) -> None:
    path, state = f"{folder}/{case}.pt", STATE
    torch.save({"warm": torch.ones(1)}, path)
    if way == "LOAD":
        torch.load(path)  # all is imported, and no thread was started yet
        fastserial.uninstall()
        torch.save(state, path)
        fastserial.install()
        state = {name: float(value[0]) for name, value in state.items()}
        STATE.clear()
    limit(*map(int, case.split(":")))
    for _ in range(2):
        if way == "SAVE":
            torch.save(state, path)
            report = fastserial.last_save_report()
        else:
            loaded = torch.load(path)
            assert {name: float(value[0]) for name, value in loaded.items()} == state
            report = fastserial.last_load_report()
            del loaded
    print(report.engine, report.fallback, flush=True)


torch.set_num_threads(1)
fastserial.install()
for case in cases:
    child = os.fork()
    if not child:
        try:
            work(case)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{way} {case} failed")
