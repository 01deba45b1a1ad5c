"""CPU mode: what it patches, that it is undone, and that it is all that Megatron needs here."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_ext.upstream.cpu import CPU_PATCHES, device_mode
from tests.ranks import RankPool
from tests.upstream.cpu_runs import RUNS, Executed, train_save_resume
from tests.upstream.test_patches import is_same, stored

DOES_WITHOUT = {
    "core.distributed.distributed_data_parallel": {"DistributedDataParallel.__init__"},
    "core.models.common.language_module.language_module": {
        "LanguageModule.setup_embeddings_and_output_layer"
    },
    "core.models.gpt.gpt_model": {"GPTModel._preprocess"},
    "core.parallel_state": {"initialize_model_parallel"},
    "core.transformer.moe.moe_layer": {
        "MoELayer.setup_delayed_wgrad_for_dispatch_backward_overlap",
        "MoELayer.preprocess",
        "MoELayer.postprocess",
    },
    "core.transformer.transformer_config": {"TransformerConfig.__post_init__"},
    "core.transformer.utils": {"cat_with_oom_fallback"},
    "training.arguments": {"validate_args"},
}
"""Functions that name CUDA in a branch that CPU runs do not take: with their module's ``torch``
replaced or not, all runs give the same numbers."""


def state_of_the_process() -> tuple[list, dict[str, str], list]:
    """All that device mode may touch."""
    filters = list(logging.getLogger(megatron_random.__name__).filters)
    return stored(CPU_PATCHES), dict(os.environ), filters


def check_restored(before: tuple[list, dict[str, str], list]) -> None:
    """The process is as it was."""
    values, environment, filters = state_of_the_process()
    assert is_same(before[0], values)
    assert (environment, filters) == before[1:]


def test_the_process_is_as_before_also_after_an_error_and_nested_blocks():
    before = state_of_the_process()
    with pytest.raises(KeyError), device_mode():
        assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
        inside = state_of_the_process()
        with device_mode():
            check_restored(inside)
        check_restored(inside)
        raise KeyError
    check_restored(before)
    assert "cuda" not in vars(torch.Tensor)
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_with_a_gpu_nothing_is_patched():
    before = stored(CPU_PATCHES)
    with device_mode(has_cuda=True):
        assert is_same(before, stored(CPU_PATCHES))


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """What all runs together execute; each trains, saves and resumes on two ranks."""
    executed: Executed = set()
    for flags in RUNS.values():
        folder: Path = tmp_path_factory.mktemp("run")
        results = ranks(2).run(train_save_resume, flags, folder, timeout=120)
        for losses, functions in results:
            assert losses[1] < losses[0] < 7.0, flags
            executed |= functions
    return executed


def test_what_names_cuda_and_runs_here_is_in_the_table(runs: Executed):
    table = {row.target.removeprefix("megatron.").partition(":")[0] for row in CPU_PATCHES}
    outside = {(module, name) for module, name in runs if module and module not in table}
    known = {(module, name) for module, names in DOES_WITHOUT.items() for name in names}
    assert not outside - known, "they name CUDA: give each a row in cpu.py, or a place above"
    assert not known - outside, "no run executes them any more: drop them above"


def test_every_row_is_used(runs: Executed):
    modules = {module for module, _ in runs}
    functions = {function for module, function in runs if not module}
    unused = []
    for row in CPU_PATCHES:
        module, _, name = row.target.removeprefix("megatron.").partition(":")
        if name == "torch":
            unused += [] if module in modules else [row.target]
        elif hasattr(row.replacement, "__code__"):
            unused += [] if row.replacement.__qualname__ in functions else [row.target]
    assert not unused, "no run needs them: delete them, or add a run that does"
