"""Converted checkpoints in Megatron: filled, exported, moved to torch_dist and back, on layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.mla.assembly import assemble
from megatron_ext.mla.checkpoint import (
    CheckpointConversion,
    begin,
    convert_layers,
)
from megatron_ext.mla.presets import preset
from megatron_ext.mla.read import attention_prefix, read_latent_layer
from megatron_ext.mla.tensors import layer_tensors
from megatron_ext.mla.written_out import written_out_logprobs
from megatron_ext.options.ranges import BadOptions
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.evaluate import parse_for_evaluation
from megatron_ext.upstream.mla_parts import LatentShape
from megatron_ext.upstream.self_check import Line, against_transformers
from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.operators import Block
from tests.mla.test_checkpoint import calibrated
from tests.ranks import RankPool
from tests.upstream.hf_jobs import visit
from tests.upstream.mla_jobs import shapes_of
from tests.upstream.test_convert import loaded_logits, there_and_back
from tests.upstream.test_self_check import opened
from tests.weights.tiny_models import MODELS, Tiny, save, tokens

pytestmark = pytest.mark.slow
MODELS_WITH_PAIRS = {
    "llama": 6,
    "llama tied biased": 4,
    "llama 3.2": 12,
    "qwen2 yarn": 4,
    "qwen3": 6,
    "mixtral": 6,
    "mqa": 6,
    "mha": 6,
}
"""All of a head."""
MHA = Tiny(family="llama", config={"head_dim": 12, "num_key_value_heads": 4})
MQA = Tiny(family="llama", config={"head_dim": 12, "num_key_value_heads": 1})
"""One KV head: with a slot for every pair, layout `deepseek` is exact too."""
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4 = "--tensor-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Full-rank conversions with all pairs, and the logits of the originals in transformers."""
    root = tmp_path_factory.mktemp("mla")
    return {
        name: (root / f"{name} mla", converted(name, root, pairs=pairs))
        for name, pairs in MODELS_WITH_PAIRS.items()
    }


def converted(name: str, root: Path, *, pairs: int) -> Tensor:
    """Convert a tiny model; the logits of the original."""
    logits = save((MODELS | {"mha": MHA, "mqa": MQA})[name], root / name)
    source = open_checkpoint(root / name)
    shape, statistics = source.architecture, None
    kept, options = 2 * pairs, {"rope_strategy": "high"}
    if name == "mqa":
        kept, options = 0, {"mla_layout": "deepseek", "rope_stride": 1}
        statistics = calibrated(root / name, root / "statistics.safetensors")
    rank = min(shape.hidden_size, shape.num_groups * (2 * shape.head_size - kept))
    config = preset(
        "paper-joint", rope_pairs=pairs, kv_rank=rank, rope_compensation=False, **options
    )
    # Without the checks, which refuse a conversion that saves nothing.
    job = CheckpointConversion(
        source=source, target=root / f"{name} mla", config=config, statistics=statistics
    )
    convert_layers(begin(job), range(shape.num_layers), done=lambda _: None)
    assemble(job, progress=lambda _: None)
    return logits


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Within rounding of float32; the vocabulary's padding is left out."""
    error = float((logits[..., : expected.shape[-1]] - expected).abs().max())
    return error < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("flags", [TP2, PP2, EP2])
def test_logits_are_those_of_the_original_and_the_export_is_the_file(
    ranks: RankPool, models: dict[str, tuple[Path, Tensor]], flags: str
):
    """E1 and E11: nothing but the folder, in another process; bit for bit on the way out."""
    folders = {name: folder for name, (folder, _) in models.items()}
    if "tensor" in flags:
        del folders["mqa"]  # which its one KV head refuses
    if "expert" in flags:
        folders = {"mixtral": folders["mixtral"]}
    for rank, found in enumerate(ranks(2).run(visit, folders, flags, tokens())):
        for name, (logits, is_same) in found.items():
            assert logits is None or is_close(logits, models[name][1]), name
            assert is_same or rank, name


def test_through_torch_dist_and_back_is_the_same(
    ranks: RankPool, models: dict[str, tuple[Path, Tensor]], tmp_path: Path
):
    names = ["llama tied biased", "qwen3", "mixtral", "mha"]
    folders = [models[name][0] for name in names]
    ranks(1).run(there_and_back, folders, tmp_path)
    for folder in folders:
        back = tmp_path / "hf" / folder.name
        for name in ("model.safetensors", "config.json"):
            assert (folder / name).read_bytes() == (back / name).read_bytes(), folder.name
    for found in ranks(2).run(loaded_logits, folders, tmp_path, TP2, tokens()):
        for logits, name in zip(found, names, strict=True):
            assert is_close(logits, models[name][1]), name
    for [logits] in ranks(4).run(loaded_logits, folders[-1:], tmp_path, TP4, tokens()):
        assert is_close(logits, models["mha"][1])


def test_the_arguments_describe_the_layers(ranks: RankPool, models: dict[str, tuple[Path, Tensor]]):
    """What flags make of a model's traits is what its conversion made."""
    folders = {name: folder for name, (folder, _) in models.items()}
    [found] = ranks(1).run(shapes_of, folders)
    for name, shape in found.items():
        architecture = open_checkpoint(folders[name]).architecture
        assert architecture.converted is not None
        assert isinstance(shape, LatentShape) and shape.num_pairs == MODELS_WITH_PAIRS[name]
        assert shape.has_norms == architecture.qk_norm
        assert shape.has_query_bias == architecture.qkv_bias
        width = architecture.head_size + (2 * shape.num_pairs if name == "mqa" else 0)
        assert shape.softmax_scale == pytest.approx(width**-0.5)


@pytest.mark.parametrize(
    "words",
    [["--rope-type", "yarn"], ["--rotary-interleaved"], ["--multi-latent-attention"]],
    ids=lambda words: words[0],
)
def test_flags_of_other_attention_are_refused(
    models: dict[str, tuple[Path, Tensor]], words: list[str]
):
    """E16: nothing of Megatron's own latent attention and its RoPE reaches converted layers."""
    with pytest.raises(BadOptions, match=words[0]), device_mode():
        parse_for_evaluation(["--hf-model", str(models["llama"][0]), *words], seq_length=32)


@pytest.mark.parametrize("name", ["llama tied biased", "qwen3", "mqa"])
def test_a_layer_comes_back_from_its_tensors(models: dict[str, tuple[Path, Tensor]], name: str):
    source = open_checkpoint(models[name][0])
    prefix = attention_prefix(1)
    found = layer_tensors(read_latent_layer(source, 1))
    kept = {n.removeprefix(prefix) for n in source.source.tensors if n.startswith(prefix)}
    assert found.keys() == kept
    for part, values in found.items():
        info = source.source.tensors[prefix + part]
        block = Block(name=prefix + part, rows=slice(0, info.shape[0]))
        assert torch.equal(values, source.source.read(block)), part


@pytest.mark.parametrize("name", ["llama tied biased", "qwen3", "mqa"])
def test_absorbed_decoding_has_the_originals_logprobs(
    models: dict[str, tuple[Path, Tensor]], name: str
):
    """E6 of whole models: prefill, then token by token, against transformers' original."""
    folder, logits = models[name]
    expected = logits[:, :-1].log_softmax(-1).gather(-1, tokens()[:, 1:, None])[..., 0]
    found = written_out_logprobs(folder, tokens())
    # fp32 through four layers, twice: weights multiplied out, and queries moved into the latent
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def first_lines(folder: Path, scratch: Path, flags: str) -> list[Line]:
    """The self-check's comparison, for the checkpoint and for one with a changed frequency."""
    with device_mode():
        setup = opened(folder, reference=folder, scratch=scratch, flags=flags)
        sound = against_transformers(setup)
        for chunk in setup.stepper.model.bare_chunks:
            for layer in chunk.decoder.layers:
                layer.self_attention.frequency_bits.add_(2**20)
        return [sound, against_transformers(setup)]


def test_the_self_check_compares_with_absorbed_decoding(
    ranks: RankPool, models: dict[str, tuple[Path, Tensor]], tmp_path: Path
):
    folder = models["qwen3"][0]
    for sound, changed in ranks(2).run(first_lines, folder, tmp_path, TP2, timeout=110):
        assert sound.name == "log-probs equal absorbed decoding's"
        assert sound.passed and not changed.passed, (sound, changed)
