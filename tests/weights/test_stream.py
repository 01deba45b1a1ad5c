"""Whole parameters, made from a checkpoint one by one, give the checkpoint back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.weights.checks import open_checkpoint, tensor_shapes
from megatron_ext.weights.families import parameters
from megatron_ext.weights.operators import WHOLE, fill
from megatron_ext.weights.stream import announced_tensors, checkpoint_tensors
from tests.weights.tiny_models import BASE, MODELS, save


@pytest.mark.parametrize("name", ["llama tied biased", "mixtral", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(tmp_path: Path, name: str, dtype: torch.dtype):
    save(MODELS[name], tmp_path, dtype=dtype)
    file = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    back = {}
    for parameter in parameters(checkpoint.architecture, padded_vocab_size=128):
        if parameter.is_copy:
            continue
        values = torch.empty(
            parameter.operator.local_shape(WHOLE),
            dtype=torch.float32 if parameter.is_float32 else dtype,
        )
        fill(values, parameter.operator, shard=WHOLE, read=checkpoint.source.read)
        if "word_embeddings" in parameter.name:
            assert values.shape[0] == 128
            assert values[BASE["vocab_size"] :].count_nonzero() == 0
        back |= checkpoint_tensors(parameter, values)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[n], file[n]) and back[n].dtype == file[n].dtype for n in file)
    announced = announced_tensors(checkpoint.architecture, dtype=dtype)
    assert list(announced) == list(back)
    assert all(announced[n].dtype == file[n].dtype for n in file)
    assert {n: info.shape for n, info in announced.items()} == dict(
        tensor_shapes(checkpoint.architecture)
    )


def test_types_are_kept_where_asked(tmp_path: Path):
    save(MODELS["llama"], tmp_path, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    announced = announced_tensors(
        checkpoint.architecture, dtype=torch.float32, like=checkpoint.source.tensors
    )
    assert {info.dtype for info in announced.values()} == {torch.bfloat16}
