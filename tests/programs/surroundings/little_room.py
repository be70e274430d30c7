"""Save or load where little is left: `SAVE|LOAD FILE MiB-of-address-space descriptors` (or 0)."""

import os
import resource
import sys

import torch

import fastserial

way, path, room, descriptors = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
fastserial.install()
# more than is read ahead: what threads take is missing for storages then
each = (40 if way == "LOAD" else 4) << 18
state = {f"t{i}": torch.full((each,), float(i)) for i in range(10)}
if way == "LOAD":
    torch.save({"warm": torch.ones(1)}, path)
    torch.load(path)  # all is imported, and no thread was started yet
    fastserial.uninstall()
    torch.save(state, path)
    fastserial.install()
    state = {name: float(value[0]) for name, value in state.items()}
else:
    torch.save({"warm": torch.ones(1)}, path)
if room:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (room << 20),) * 2)
if descriptors:
    last = os.dup(0)
    os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + descriptors,) * 2)
for _ in range(2):
    if way == "SAVE":
        torch.save(state, path)
        report = fastserial.last_save_report()
    else:
        loaded = torch.load(path)
        assert {name: float(value[0]) for name, value in loaded.items()} == state
        report = fastserial.last_load_report()
        del loaded
print(report.engine, report.fallback)
