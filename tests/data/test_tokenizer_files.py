"""Folders of tokenizers: no code of theirs is run, and what is wrong is one message."""

from __future__ import annotations

import io
import json
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.hugging_face import load_tokenizer
from tests.data.hostile import AUTO_MAPS, add_program, edit_tokenizer, tokenizer_folder


class Program:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A stdin that answers every question with yes."""
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr(sys, "stdin", answers)
    return answers


@pytest.mark.parametrize("case", AUTO_MAPS)
def test_n7_a_tokenizer_with_code_is_refused_unasked(case: str, tmp_path: Path, agreeing) -> None:
    """CASES N7."""
    file, auto_map = AUTO_MAPS[case]
    add_program(tokenizer_folder(tmp_path), file, auto_map)
    with pytest.raises(ValueError, match=rf"{file} has an auto_map, .* never run"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists() and agreeing.tell() == 0


@pytest.mark.slow
def test_n7_code_of_the_model_is_not_run_for_its_tokenizer(tmp_path: Path, agreeing) -> None:
    """CASES N7: official folders have it beside a model that transformers knows, or does not."""
    own = {"AutoConfig": "program.OwnConfig", "AutoModelForCausalLM": "program.Own"}
    for model_type in ("llama", "own"):
        folder = tokenizer_folder(tmp_path / model_type)
        add_program(folder, "config.json", own, model_type=model_type)
        assert len(load_tokenizer(folder)("a").input_ids) == 1
        assert not (folder / "ran").exists()
    assert agreeing.tell() == 0


@pytest.mark.slow
def test_n7_a_model_with_code_is_refused_unasked(tmp_path: Path, agreeing) -> None:
    """CASES N7."""
    import torch

    from megatron_ext.evaluation.transformers_model import transformers_logprobs

    own = {"AutoConfig": "program.OwnConfig", "AutoModelForCausalLM": "program.Own"}
    add_program(tmp_path, "config.json", own, model_type="own")
    with pytest.raises(ValueError, match="transformers cannot load"):
        transformers_logprobs(tmp_path, torch.zeros(1, 2, dtype=torch.int64))
    assert not (tmp_path / "ran").exists() and agreeing.tell() == 0


@pytest.mark.slow
def test_n7_pickled_weights_are_not_read(tmp_path: Path) -> None:
    """CASES N7: nothing that could run code is unpickled for the comparison with transformers."""
    import torch

    from megatron_ext.evaluation.transformers_model import transformers_logprobs

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"transformers cannot load .* no file named model\.safet"):
        transformers_logprobs(tmp_path, torch.zeros(1, 2, dtype=torch.int64))
    assert not (tmp_path / "ran").exists()


def test_n7_nothing_is_looked_for_elsewhere(tmp_path: Path, monkeypatch) -> None:
    """CASES N7: a folder that is missing is no name on a hub, nor in the cache of one."""

    def refuse(*_: Any) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("gpt2", "someone/model", str(tmp_path / "missing")):
        with pytest.raises(ValueError, match=f"--tokenizer-model {name} is no folder"):
            load_tokenizer(name)
    with pytest.raises(ValueError, match=r"--tokenizer-model a\.gguf is no file"):
        load_tokenizer("a.gguf")
    assert load_tokenizer(tokenizer_folder(tmp_path)).is_fast


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"pre_tokenizer": {"type": "Novel"}}, "pre_tokenizer of type 'Novel'"),
        ({"normalizer": {"type": "Novel", "a": 1}}, "normalizer of type 'Novel'"),
        ({"decoder": {"type": "Novel"}}, "decoder of type 'Novel'"),
        ({"post_processor": {"type": "Novel"}}, "post_processor of type 'Novel'"),
        ({"model": {"type": "Novel", "vocab": {}}}, "model of type 'Novel'"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Novel"}]}},
            "pre_tokenizer of type 'Novel'",
        ),
    ],
)
def test_n6_a_part_that_tokenizers_does_not_know(parts: dict, where: str, tmp_path: Path) -> None:
    """CASES N6: file, type, installed version and remedy in one message."""
    import tokenizers

    edit_tokenizer(tokenizer_folder(tmp_path), **parts)
    expected = rf"tokenizer\.json has a {where}, which tokenizers {tokenizers.__version__} does not"
    with pytest.raises(ValueError, match=rf"{expected} know: install a newer one \(pip install"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "Split"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}},
        {"model": None},
        {"added_tokens": [{"id": 0}]},
        {"version": "7.0"},
        {"decoder": []},
    ],
    ids=str,
)
def test_n6_what_tokenizers_cannot_read_otherwise(parts: dict, tmp_path: Path) -> None:
    """CASES N6: any error of tokenizers names the file."""
    edit_tokenizer(tokenizer_folder(tmp_path), **parts)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 1}', "\xff", "[" * 100_000])
def test_n6_a_tokenizer_that_is_none(text: str, tmp_path: Path) -> None:
    """CASES N6: the same for a file that is no JSON, or of something else."""
    (tokenizer_folder(tmp_path) / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_every_type_of_the_installed_tokenizers_is_known(tmp_path: Path) -> None:
    """The names in tokenizer.json are those of the classes."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    made = {
        "normalizer": [
            normalizers.NFC(),
            normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace("a", "b")]),
            normalizers.BertNormalizer(),
            normalizers.Prepend("_"),
        ],
        "pre_tokenizer": [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
            pre_tokenizers.Whitespace(),
            pre_tokenizers.BertPreTokenizer(),
        ],
        "decoder": [
            decoders.BPEDecoder(),
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]),
            decoders.CTC(),
            decoders.WordPiece(),
        ],
        "post_processor": [
            processors.TemplateProcessing(single="a $0", special_tokens=[("a", 1)]),
            processors.Sequence([processors.ByteLevel(), processors.ByteLevel()]),
        ],
    }
    from megatron_ext.data.tokenizer_files import check_tokenizer_files

    folder = tokenizer_folder(tmp_path)
    for key, parts in made.items():
        for part in parts:
            edit_tokenizer(folder, **{key: json.loads(part.__getstate__())})
            check_tokenizer_files(folder)
