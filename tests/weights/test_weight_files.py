"""Of a folder's files one set is read, whole and under known names, or the folder is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_ext.weights.checks import Checkpoint, open_checkpoint
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError
from tests.marks import slow_except
from tests.weights.folders import CONFIG, random_tensors, write_folder
from tests.weights.tiny_models import MODELS, build

TIED = CONFIG | {"tie_word_embeddings": True}
FIRST, SHARDS = "model-00001-of-00002.safetensors", "model-*-of-00002.safetensors"


def whole(checkpoint: Checkpoint, name: str) -> Tensor:
    rows = slice(0, checkpoint.source.tensors[name].shape[0])
    return checkpoint.source.read(Block(name=name, rows=rows)).clone()


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def output_of_transformers(folder: Path) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    )
    return model.get_output_embeddings().weight.detach()


def test_an_output_layer_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path):
    """N1: as transformers does, and said; config.json is corrected for conversions."""
    own = torch.randn(11, 8)
    write_folder(tmp_path, config=TIED, tensors=random_tensors(TIED) | {"lm_head.weight": own})
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(output_of_transformers(tmp_path), own)
    assert checkpoint.architecture.untied
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(whole(checkpoint, "lm_head.weight"), own)
    assert any("lm_head.weight is not model.embed_tokens.weight" in n for n in checkpoint.notes)


def test_a_copy_of_the_embedding_stays_tied(tmp_path: Path):
    """N1"""
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].bfloat16().float()
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].bfloat16()
    write_folder(tmp_path, config=TIED, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.architecture.tied and checkpoint.notes == ()


def test_an_output_layer_of_another_shape_is_refused(tmp_path: Path):
    """N1"""
    write_folder(
        tmp_path, config=TIED, tensors=random_tensors(TIED) | {"lm_head.weight": torch.ones(2)}
    )
    assert "lm_head.weight is [2], not [11, 8]" in refused(tmp_path)


def test_a_tied_model_saved_with_the_output_layer_only(tmp_path: Path):
    """N1: transformers ties the tensor that is there."""
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_folder(tmp_path, config=TIED, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path)
    name = "model.embed_tokens.weight"
    assert torch.equal(whole(checkpoint, name), tensors["lm_head.weight"])
    assert torch.equal(output_of_transformers(tmp_path), tensors["lm_head.weight"])
    assert name in checkpoint.notes[0]


def two_sets(folder: Path, other: str) -> None:
    """An indexed checkpoint of two files, and another file beside it."""
    write_folder(folder, num_files=2)
    if other.endswith(".safetensors"):
        save_file(random_tensors(), folder / other)
    else:
        (folder / other).write_text("{}")


@pytest.mark.parametrize(
    "other",
    [
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "model.fp16.safetensors",
        "model.safetensors.index.fp16.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00003.bin",
        "model-Q8_0.gguf",
    ],
)
def test_two_sets_of_weights_are_refused_by_name(tmp_path: Path, other: str):
    """N2"""
    two_sets(tmp_path, other)
    text = refused(tmp_path)
    assert f"two sets of weights: {SHARDS}, model.safetensors.index.json; and" in text
    assert other.replace("-00003-of", "-*-of").replace("-00001-of", "-*-of") in text


def test_other_files_are_no_weights(tmp_path: Path):
    """N2: what a Trainer, and Mistral beside Hugging Face's format, leave in a folder."""
    write_folder(tmp_path)
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "tokenizer.model"):
        (tmp_path / name).write_text("x")
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert open_checkpoint(tmp_path).notes == ()


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path):
    """N2: transformers would load the adapter as well."""
    write_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "an adapter (adapter_config.json) beside the weights" in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    """N2: which of the two is meant, nobody knows."""
    write_folder(tmp_path, num_files=2)
    second = tmp_path / FIRST.replace("00001", "00002")
    first = load_file(tmp_path / FIRST)
    save_file(load_file(second) | {"model.norm.weight": torch.ones(8)} | first, second)
    assert f"in {second.name} and in another file as well" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", slow_except({"mixtral", "deepseek_v3"}, ["qwen3_moe", "mixtral", "deepseek_v3"])
)
def test_fused_experts_are_read_as_single_ones(tmp_path: Path, name: str):
    """N23: transformers 5 saves them stacked with ``save_original_format=False``."""
    model = build(MODELS[name])
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    checkpoint = open_checkpoint(tmp_path / "fused")
    single = load_file(tmp_path / "single" / "model.safetensors")
    assert checkpoint.source.tensors.keys() == single.keys()
    for key, tensor in single.items():
        assert torch.equal(whole(checkpoint, key), tensor), key
        if tensor.ndim == 2:
            block = Block(name=key, rows=slice(1, 3), columns=slice(2, 5))
            assert torch.equal(checkpoint.source.read(block), tensor[1:3, 2:5]), key


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
    ],
)
def test_prefixes_of_wrappers_are_left_out_and_said(tmp_path: Path, wrapped: Any):
    """N25"""
    tensors = random_tensors()
    write_folder(tmp_path, tensors={wrapped(name): value for name, value in tensors.items()})
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(whole(checkpoint, name), tensor)
    assert "saved from inside a wrapper" in checkpoint.notes[0]


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path: Path):
    """N25"""
    tensors = random_tensors()
    write_folder(tmp_path, tensors=tensors | {"module.model.norm.weight": torch.ones(8)})
    assert "twice, with and without the prefix of a wrapper" in refused(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "remedy"),
    [
        ("base_model.model.", "an adapter (PEFT) around the model. Merge it into the model first"),
        ("model.language_model.", "not part of a llama"),
    ],
)
def test_other_prefixes_name_the_cause(tmp_path: Path, prefix: str, remedy: str):
    """N25"""
    write_folder(tmp_path, tensors={prefix + name: v for name, v in random_tensors().items()})
    assert remedy in refused(tmp_path)


def test_a_model_without_its_head_names_the_cause(tmp_path: Path):
    """N25: saved by ``AutoModel``, whose names lack ``model.``."""
    tensors = {name.removeprefix("model."): value for name, value in random_tensors(TIED).items()}
    write_folder(tmp_path, config=TIED, tensors=tensors)
    assert "saved without its output layer (AutoModel)" in refused(tmp_path)


def test_dropped_tensors_are_said(tmp_path: Path):
    """N1: every tensor that is not used is named."""
    from tests.weights.test_checks import DEEPSEEK

    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    write_folder(tmp_path, config=DEEPSEEK, tensors=random_tensors(DEEPSEEK) | extra)
    assert open_checkpoint(tmp_path, drop_mtp=True).notes == (
        "model.layers.2.eh_proj.weight: left out (--drop-mtp-layers).",
    )
