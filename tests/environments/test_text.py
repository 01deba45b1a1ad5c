"""Prompts and chats through a tokenizer of transformers; the source of --tasks."""

from __future__ import annotations

import json

import pytest

from megatron_ext.environments.arithmetic import ArithmeticSource
from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.base import EpisodeLimits
from megatron_ext.environments.config import EnvironmentConfig
from megatron_ext.environments.datasets import TextTask
from megatron_ext.environments.sources import open_evaluation, open_source
from megatron_ext.environments.text import CharacterCodec, HuggingFaceCodec, TextEnvironment
from megatron_ext.rewards.base import Verdict
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.verifiers import Verifiers
from tests.data.tiny_tokenizer import byte_tokenizer

TOKENS = byte_tokenizer()
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
CODEC = CharacterCodec(TOKENIZER, stop=".")


def test_a_plain_prompt_is_encoded_as_it_is():
    codec = HuggingFaceCodec(TOKENS)
    assert TOKENS.decode(codec.encode("1+1?")) == "1+1?"


def test_a_chat_ends_where_the_answer_begins():
    ids = HuggingFaceCodec(TOKENS).encode(CHAT)
    assert TOKENS.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    as_chat = HuggingFaceCodec(TOKENS, prompts_as_messages=True)
    assert as_chat.encode("1+1?") == as_chat.encode(CHAT[1:])


def test_a_chat_needs_a_template():
    with pytest.raises(ValueError, match="the tokenizer has no chat template: give tasks a"):
        HuggingFaceCodec(byte_tokenizer(template=None)).encode(CHAT)


@pytest.mark.parametrize(("said", "seen"), [("2é<|im_end|>", "2é"), ("2é", "2é"), ("", "")])
def test_the_grader_sees_the_response_without_its_stop(said, seen):
    responses = []

    def grade(task, response):
        responses.append((task.id, response))
        return Verdict(reward=0.25, error="tired")

    environment = TextEnvironment(HuggingFaceCodec(TOKENS), grade)
    task = TextTask(id="a", prompt="1+1?", answer="2", verifier="exact")
    assert environment.reset(task, seed=1) == HuggingFaceCodec(TOKENS).encode("1+1?")
    answer = environment.step(TOKENS(said)["input_ids"])
    assert (answer.reward, answer.done, answer.warning) == (0.25, True, "tired")
    assert responses == [("a", seen)]
    assert environment.stop_ids == {TOKENS.eos_token_id}


@pytest.fixture
def verify():
    """Verifiers that start no process."""
    with Verifiers(RewardConfig()) as verifiers:
        yield verifiers


def test_the_built_in_tasks_need_no_tokenizer(verify):
    assert isinstance(open_source(EnvironmentConfig(), codec=None, verify=verify), ArithmeticSource)


def test_files_of_tasks(verify, tmp_path):
    paths = {}
    for name in ("tasks", "eval_tasks"):
        paths[name] = tmp_path / f"{name}.jsonl"
        task = {"prompt": "Q1b+1?", "answer": 2, "verifier": "exact", "id": name}
        paths[name].write_text(json.dumps(task))
    config = EnvironmentConfig(**{name: str(path) for name, path in paths.items()})
    source = open_source(config, codec=CODEC, verify=verify)
    assert (source.train(3).id, source.held_out(1)[0].id) == ("tasks", "eval_tasks")


def test_what_is_evaluated(verify, tmp_path):
    """Held-out tasks; of a file without held-out ones its own, all or the first."""
    source, tasks = open_evaluation(EnvironmentConfig(), codec=None, verify=verify)
    assert tasks == ArithmeticSource().held_out(200)
    path = tmp_path / "gsm8k.jsonl"
    records = [{"question": f"{i}+{i}?", "answer": f"#### {2 * i}"} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, records)))
    config = EnvironmentConfig(tasks=f"gsm8k:{path}")
    codec = HuggingFaceCodec(TOKENS)
    assert config.is_file
    for count, ids in ((None, "12345"), (2, "12")):
        source, tasks = open_evaluation(config, codec=codec, verify=verify, count=count)
        assert "".join(task.id for task in tasks) == ids
        environment = source.environment()
        environment.reset(tasks[1])
        assert environment.step(TOKENS("It is 2.<|im_end|>")["input_ids"]).reward == 1
    for count in (0, 6):
        with pytest.raises(ValueError, match=rf"--num-tasks {count} of the 5 in gsm8k:.*: ask for"):
            open_evaluation(config, codec=codec, verify=verify, count=count)
    with pytest.raises(ValueError, match="--num-tasks 0: ask for at least 1"):
        open_evaluation(EnvironmentConfig(), codec=None, verify=verify, count=0)


@pytest.mark.parametrize(
    ("options", "codec", "problem"),
    [
        (
            {"tasks": "nowhere.jsonl"},
            CODEC,
            "--tasks nowhere.jsonl is no file: give a JSONL file, ",
        ),
        ({"tasks": "nowhere.jsonl"}, None, "--tasks nowhere.jsonl are texts: name a tokenizer"),
        ({"tasks": __file__}, CODEC, "line 1: is not JSON"),
    ],
)
def test_tasks_that_cannot_be_had_are_an_error(verify, options, codec, problem):
    with pytest.raises(ValueError, match=problem):
        open_source(EnvironmentConfig(**options), codec=codec, verify=verify)


def test_a_prompt_without_ids_is_said_before_training(verify, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "why?", "answer": 2, "verifier": "exact"}))
    with pytest.raises(ValueError, match="is not in the vocabulary"):
        open_source(EnvironmentConfig(tasks=str(path)), codec=CODEC, verify=verify)


def test_limits_are_those_of_the_options():
    config = EnvironmentConfig(max_turns=3, max_turn_tokens=9)
    assert config.limits(max_new_tokens=20, max_context=50) == EpisodeLimits(
        max_new_tokens=20, max_context=50, max_turns=3, max_turn_tokens=9
    )


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({}, []),
        ({"tasks": "a.jsonl", "eval_tasks": "b.jsonl"}, []),
        ({"eval_tasks": "b.jsonl"}, ["--eval-tasks b.jsonl has no effect with --tasks arithmetic"]),
    ],
)
def test_options(options, problems):
    found = EnvironmentConfig(**options).problems()
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))


def test_numbers_out_of_range_are_refused_together():
    with pytest.raises(ValueError, match="--max-turns -1 must be at least 0") as raised:
        EnvironmentConfig(max_turns=-1, environment_workers=0)
    assert "--environment-workers 0 must be from 1 to 4096" in str(raised.value)
