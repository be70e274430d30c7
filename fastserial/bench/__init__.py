"""The benchmarks that users run: `fastserial bench ...` and `fastserial demo`.

A benchmark is a list of `Row`s (subjects). `measuring.rotation` runs them interleaved, `summary`
turns the samples into medians and paired ratios, `presenting` shows those.
"""
