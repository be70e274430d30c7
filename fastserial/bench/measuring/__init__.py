"""How a benchmark measures: samples, rotation, summaries, the machine."""
