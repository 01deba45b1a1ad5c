"""Measures what megatron-ext claims: `python tools/benchmark.py NAME [options]`.

Each name is a module of tools/benchmarks.  A table goes to the terminal, with every value's ratio
to the first of its row; --output writes the figures as JSON, with what they were measured on.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ext.options.ranges import in_range
from megatron_ext.report.whole_file import check_writable

BENCHMARKS = {
    "checkpoints": "checksums of files against writing and loading them",
    "cpu-mode": "a training step in CPU mode against the same modules without it",
    "episodes": "many episodes of the built-in tasks: time and memory",
    "graders": "the verifiers on thousands of right and wrong answers",
    "grpo": "a GRPO step against TRL's GRPOTrainer",
    "logprobs": "chunked log-probabilities against full logits",
    "mha2mla": "perplexity of converted checkpoints without training",
    "microbatches": "token budgets against fixed micro-batches",
    "packing": "packed rows against padded ones",
    "rollout": "decoding against transformers",
}
"""Name of the subcommand -> what it compares; the module has its name with underscores."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = "\n".join(f"  {name:14}{text}" for name, text in BENCHMARKS.items())
    name = words[0] if words else ""
    if name not in BENCHMARKS:
        asks = name in ("-h", "--help", "")
        stray = "" if asks else f"benchmark.py: error: there is no benchmark {name}.\n"
        sys.stderr.write(f"{__doc__}\n{names}\n{stray}")
        sys.exit(0 if asks else 2)
    module = import_module(f"tools.benchmarks.{name.replace('-', '_')}")
    parser = ArgumentParser(prog=f"benchmark.py {name}", description=module.__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for the figures; unset = none")
    module.add_arguments(parser)
    for action in parser._actions:  # 0 counts only where the help says what it does
        if action.type in (int, float):
            least = {"at_least": 0} if "0 =" in (action.help or "") else {}
            limits = {"at_least": 1, **least} if action.type is int else {"above": 0}
            action.type = in_range(action.type, **limits)
    options = parser.parse_args(words[1:])
    try:
        if options.output is not None:
            check_writable(options.output, flag="--output")
        figures = module.run(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if os.environ.get("RANK", "0") != "0":  # torchrun's; the first rank has the figures of all
        return
    sys.stdout.write(table(figures))
    if options.output is not None:
        settings = {key: str(value) for key, value in vars(options).items() if key != "output"}
        record = {"benchmark": name, "options": settings, "machine": machine(), "figures": figures}
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def table(figures: Mapping[str, object]) -> str:
    """One line a figure; of several ways to do the same, the ratio to the first as well."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, Mapping) and value:
            first = next(iter(value.values()))
            cells = [
                f"{way} {shown(x)}" + (f" (x {x / first:.3g})" if way_is_later and first else "")
                for way_is_later, (way, x) in enumerate(value.items())
            ]
            lines.append(f"{name:27} {'   '.join(cells)}")
        else:
            lines.append(f"{name:27} {shown(value)}")
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A figure with the digits that matter."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
