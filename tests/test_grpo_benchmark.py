"""The benchmark `grpo`: our side's episodes have the lengths they are told, and are trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.tiny_tokenizer import byte_tokenizer
from tests.ranks import RankPool
from tools.benchmarks.grpo import compare, problems
from tools.benchmarks.grpo_ours import our_steps

LENGTHS = [3, 1, 9, 2, 4, 4, 8, 5]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama of bytes."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def steps_of(model: Path) -> list[dict[str, float]]:
    """Metrics of two steps of two prompts with four completions each."""
    options = Namespace(group_size=4, lr=1e-3, max_tokens_per_microbatch=128)
    with our_steps(options, model=model, prompts=["ab", "cde"], longest=9) as steps:
        return [steps.step(LENGTHS), steps.step(LENGTHS[::-1])]


@pytest.mark.slow
def test_our_episodes_have_the_lengths_they_are_told(ranks: RankPool, model: Path) -> None:
    (found,) = ranks(1).run(steps_of, model)
    for metrics in found:
        assert metrics["trained_tokens"] == sum(LENGTHS)
        assert metrics["tokens"] == sum(LENGTHS) + 4 * 5
        assert metrics["response_tokens_max"] == 9 and metrics["response_tokens_min"] == 1
        assert metrics["trained_episodes"] == 8 and metrics["grad_norm"] > 0
        assert metrics["zero_variance_group_share"] < 1


class ScriptedSteps:
    """Takes a second for every token, half of it for the rollout."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def step(self, lengths: Sequence[int]) -> dict[str, Any]:
        """What a step takes."""
        seconds = self.factor * sum(lengths)
        return {"seconds": seconds, "rollout_seconds": seconds / 2, "cpu_seconds": 2 * seconds}


def test_figures_are_of_real_tokens() -> None:
    sides = {"slow": ScriptedSteps(4.0), "fast": ScriptedSteps(1.0)}
    found = compare(sides, LENGTHS, rounds=2, prompt_tokens=36)
    assert found["padding"] == pytest.approx(1 - 36 / 72)
    assert found["seconds"] == {"slow": 144, "fast": 36}
    assert found["all_tokens_per_s"] == {"slow": 0.5, "fast": 2.0}
    assert found["rollout_tokens_per_s"] == {"slow": 0.5, "fast": 2.0}
    assert found["train_tokens_per_s"] == {"slow": 1.0, "fast": 4.0}
    assert found["cpu_tokens_per_s"] == {"slow": 0.25, "fast": 1.0}


def test_options_that_do_not_fit_are_named() -> None:
    fits = {"prompts": 2, "group_size": 4, "batch_size": 4, "trl_python": None}
    assert problems(Namespace(**fits)) == []
    wrong = problems(Namespace(**fits | {"batch_size": 3, "trl_python": Path("/no/python")}))
    assert "--trl-python /no/python is no file" in wrong[0]
    assert "--batch-size 3 does not divide the 8 completions" in wrong[1]
