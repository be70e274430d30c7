"""What a benchmark runs: ways to save and to load, and what they save."""
