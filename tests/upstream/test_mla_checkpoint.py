"""Converted checkpoints in Megatron: filled, exported, moved to torch_dist and back, on layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from megatron_ext.mla.assembly import assemble
from megatron_ext.mla.checkpoint import CheckpointConversion, begin, convert_layers
from megatron_ext.mla.presets import preset
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.weights.checks import open_checkpoint
from tests.ranks import RankPool
from tests.upstream.hf_jobs import visit
from tests.upstream.mla_jobs import shapes_of
from tests.upstream.test_convert import loaded_logits, there_and_back
from tests.weights.tiny_models import MODELS, save, tokens

pytestmark = pytest.mark.slow
PAIRS = {"llama tied biased": 4, "qwen2 yarn": 4, "qwen3": 6, "mixtral": 6}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Full-rank conversions with all pairs, and the logits of the originals in transformers."""
    root = tmp_path_factory.mktemp("mla")
    found = {}
    for name, pairs in PAIRS.items():
        logits = save(MODELS[name], root / name)
        source = open_checkpoint(root / name)
        shape = source.architecture
        rank = min(shape.hidden_size, shape.num_groups * (2 * shape.head_size - 2 * pairs))
        config = preset(
            "paper-joint",
            rope_strategy="high",
            rope_pairs=pairs,
            rope_compensation=False,
            kv_rank=rank,
        )
        target = root / f"{name} mla"
        # Without the checks, which refuse a conversion that saves nothing.
        job = CheckpointConversion(source=source, target=target, config=config, statistics=None)
        convert_layers(begin(job), range(shape.num_layers), done=lambda _: None)
        assemble(job, progress=lambda _: None)
        found[name] = target, logits
    return found


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Within rounding of float32; the vocabulary's padding is left out."""
    error = float((logits[..., : expected.shape[-1]] - expected).abs().max())
    return error < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("flags", [TP2, PP2])
def test_logits_are_those_of_the_original_and_the_export_is_the_file(
    ranks: RankPool, models: dict[str, tuple[Path, Tensor]], flags: str
):
    """E1 and E11: nothing but the folder, in another process; bit for bit on the way out."""
    folders = {name: folder for name, (folder, _) in models.items()}
    for rank, found in enumerate(ranks(2).run(visit, folders, flags, tokens())):
        for name, (logits, is_same) in found.items():
            assert logits is None or is_close(logits, models[name][1]), name
            assert is_same or rank, name


def test_through_torch_dist_and_back_is_the_same(
    ranks: RankPool, models: dict[str, tuple[Path, Tensor]], tmp_path: Path
):
    folders = [folder for folder, _ in models.values()]
    ranks(1).run(there_and_back, folders, tmp_path)
    for folder in folders:
        back = tmp_path / "hf" / folder.name
        for name in ("model.safetensors", "config.json"):
            assert (folder / name).read_bytes() == (back / name).read_bytes(), folder.name
    for found in ranks(2).run(loaded_logits, folders, tmp_path, TP2, tokens()):
        for logits, (name, (_, expected)) in zip(found, models.items(), strict=True):
            assert is_close(logits, expected), name


def test_the_arguments_describe_the_layers(ranks: RankPool, models: dict[str, tuple[Path, Tensor]]):
    """What flags make of a model's traits is what its conversion made."""
    folders = {name: folder for name, (folder, _) in models.items()}
    [found] = ranks(1).run(shapes_of, folders)
    for name, shape in found.items():
        architecture = open_checkpoint(folders[name]).architecture
        assert architecture.converted is not None
        assert isinstance(shape, LatentShape) and shape.num_pairs == PAIRS[name]
        assert shape.has_norms == architecture.qk_norm
        assert shape.has_query_bias == architecture.qkv_bias
        width = architecture.head_size
        assert shape.softmax_scale == pytest.approx(width**-0.5)
