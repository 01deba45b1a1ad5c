"""What `tools/benchmark.py` runs: one module a subcommand, with `add_arguments` and `run`."""
