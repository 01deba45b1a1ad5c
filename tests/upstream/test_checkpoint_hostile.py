"""No file of a checkpoint makes a process run code, by whichever command it is read."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.utils import get_model_config
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.upstream import checkpoint, convert_hf
from megatron_ext.upstream.arguments import Options, parse
from megatron_ext.upstream.checkpoint_folder import folder_of
from megatron_ext.upstream.checkpoint_tensors import set_weights
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import fill_model
from megatron_ext.upstream.layout import Layout, open_layout
from megatron_ext.upstream.model import TrainableModel, build_trainable
from tests.ranks import RankPool
from tests.upstream import checkpoint_jobs as jobs
from tests.upstream.checkpoint_jobs import EXACT
from tests.upstream.hostile_checkpoints import hostile

ENTRIES = ("resume", "finetune", "pretrained", "evaluate", "convert")
Opened = tuple[Options, TrainableModel, Layout]


def enter(entry: str, opened: Opened, run: Path) -> None:
    """Read the checkpoint of a run as a command would."""
    options, model, layout = opened
    args = Namespace(**vars(options.megatron) | {"load": str(run), "save": None})
    if entry == "convert":
        convert_hf.to_hf(run, run / "hf").run(lambda _: None)
    elif entry == "evaluate":
        object.__setattr__(options, "megatron", args)
        fill_model(options, layout, chunks=model.chunks)
    else:
        change = {
            "resume": {},
            "finetune": {"finetune": True},
            "pretrained": {"load": None, "pretrained_checkpoint": str(run)},
        }[entry]
        checkpoint.resume(Namespace(**vars(args) | change), model, layout)


def outcomes(
    flags: list[str], runs: dict[str, Path], mark: Path, environment: dict[str, str]
) -> dict[tuple[str, str], tuple[str, bool]]:
    """(case, entry) -> (the error, whether code has run); one process reads all of them."""
    os.environ.update(environment)
    found = {}
    with device_mode():
        options = parse(flags)
        layout = open_layout(options.megatron)
        model = build_trainable(options.megatron, layout)
        assert get_model_config(model.chunks[0]).num_layers == 4
        for case, run in runs.items():
            for entry in ENTRIES:
                mark.unlink(missing_ok=True)
                try:
                    enter(entry, (options, model, layout), run)
                    text = "loaded"
                except (ValueError, RuntimeError, AttributeError, CheckpointException) as error:
                    text = f"{type(error).__name__}: {error}"
                found[case, entry] = (text, mark.exists())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}], ids=str)
def test_R4_nothing_of_a_hostile_checkpoint_runs(
    ranks: RankPool, tmp_path: Path, environment: dict[str, str]
):
    run, mark = tmp_path / "run", tmp_path / "mark"
    flags = jobs.flags_of(run, *EXACT, "--train-iters", "2", "--save-interval", "2")
    ranks(1).run(jobs.train, flags)
    cases = hostile(folder_of(run / "saved", 2), tmp_path, mark)
    some = "common.pt" if environment else ""  # the variable changes the default of torch.load
    runs = {case: where for case, (where, _, _) in cases.items() if case.startswith(some)}
    [found] = ranks(1).run(outcomes, flags, runs, mark, environment)
    ran = [where for where, (_, has_run) in found.items() if has_run]
    assert not ran
    wrong = {
        (case, entry): text
        for (case, entry), (text, _) in found.items()
        if not text.startswith("UnsafeCheckpointError")
        or str(folder_of(runs[case], 2) / cases[case][1]) not in text
        or cases[case][2] not in text
    }
    assert not wrong


READS = re.compile(
    r"torch\.load\(|pickle\.loads?\(|Unpickler|allow_pickle|joblib|FileSystemReader|"
    r"dist_checkpointing\.load(?!_content_metadata\(preloaded)|load_sharded_metadata|"
    r"load_(common_state_dict|tensors_metadata|plain_tensors)\(|import load_checkpoint"
)


def test_R4_one_place_reads_checkpoints():
    """Every other file of the product goes through it; a benchmark reads what it wrote."""
    root = Path(__file__).resolve().parents[2]
    places = [root / "pretrain_rl.py"]
    places += [*(root / "megatron_ext").rglob("*.py"), *(root / "tools").rglob("*.py")]
    reading = {path.name for path in places if READS.search(path.read_text())}
    assert reading == {"checkpoint_pickles.py", "checkpoint_reading.py", "checkpoints.py"}


class Layer(torch.nn.Module):
    """Takes extra state as Transformer Engine's layers do, which unpickle what is not None."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[object] = []

    def get_extra_state(self) -> None:
        """There is none."""

    def set_extra_state(self, state: object) -> None:
        """Keep what was given."""
        self.given.append(state)


def test_R4_no_layer_gets_extra_state_to_unpickle():
    layer = Layer()
    state = torch.tensor(list(b"a pickle"), dtype=torch.uint8)
    set_weights([layer], {"model": {"_extra_state": state}})  # type: ignore[list-item]
    assert layer.given == [None]
