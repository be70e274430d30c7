"""Measuring: saves and loads of this machine and disk, with stock torch and fio in the same run.

`fastserial bench save`, `bench load` and `demo` are here; the studies in `benchmarks/` build on it.
Nothing but the command line imports it.
"""
