"""The benchmarks that users run: `fastserial bench ...` and `fastserial demo`.

A benchmark is a list of `rows.Row`s. `rotation` runs them interleaved, `summary` turns the
samples into medians and paired ratios, `view` and `export` show those.
"""
