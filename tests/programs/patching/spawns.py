"""Prints whether fastserial is installed, and the arguments, here and in a spawned child."""

import multiprocessing
import sys


def report(where: str) -> None:
    import torch  # noqa: F401

    import fastserial

    print(where, fastserial.installed(), sys.flags.optimize, *sys.argv[1:], flush=True)


if __name__ == "__main__":
    report("parent")
    child = multiprocessing.get_context("spawn").Process(target=report, args=("child",))
    child.start()
    child.join()
    sys.exit(child.exitcode)
