"""Task files: what is read, and what is said about lines that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.environments.arithmetic_tasks import TOKENIZER
from megatron_ext.environments.characters import CharacterTokenizer
from megatron_ext.environments.datasets import JsonlSource, TextTask, parse_task, read_tasks
from megatron_ext.environments.gsm8k import read_gsm8k, task_of_gsm8k
from megatron_ext.environments.text import CharacterCodec
from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.plain_text import numeric
from megatron_ext.rewards.verifiers import Verifiers

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"
GOOD = {"prompt": "What is 6 x 7?", "answer": "42", "verifier": "numeric"}
CHAT = [{"role": "user", "content": "What is 6 x 7?"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def write(folder, *lines):
    path = folder / "tasks.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_what_is_read(tmp_path):
    path = write(
        tmp_path,
        GOOD,
        "  ",
        {"messages": CHAT, "answer": 0.5, "verifier": "math", "level": 3, "metadata": {"a": [1]}},
        {**GOOD, "id": "six", "verifier": "exact"},
    )
    assert read_tasks(path) == [
        TextTask(id="1", prompt="What is 6 x 7?", answer="42", verifier="numeric"),
        TextTask(
            id="3",
            prompt=(CHAT[0],),
            answer="0.5",
            verifier="math",
            metadata={"level": 3, "a": [1]},
        ),
        TextTask(id="six", prompt="What is 6 x 7?", answer="42", verifier="exact"),
    ]


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON (Expecting property name"),
        ("42", "is a number, not an object"),
        ('{"answer": NaN}', "holds NaN, which is not JSON"),
        ("[" * 100_000, "is nested deeper than 100 levels"),
        (without("prompt"), "has no `prompt` and no `messages`: give one of them"),
        ({**GOOD, "messages": CHAT}, "has both `prompt` and `messages`: give one of them"),
        ({**GOOD, "prompt": " "}, "`prompt` must be a text that is not empty"),
        ({**without("prompt"), "messages": []}, "`messages` must be a list that is not empty"),
        (
            {**without("prompt"), "messages": [{"role": "user"}]},
            "`messages[0]` must have the texts",
        ),
        ({**without("prompt"), "messages": [*CHAT, "b"]}, "`messages[1]` must have the texts"),
        (without("answer"), "`answer` must be a text or a number"),
        ({**GOOD, "answer": True}, "`answer` must be a text or a number"),
        ({**GOOD, "answer": ""}, "`answer` is empty"),
        (
            {**GOOD, "answer": "six"},
            "`answer` 'six' is not one number that the verifier numeric reads",
        ),
        ({**GOOD, "answer": "10^6"}, "`answer` '10^6' is not one number"),
        ({**GOOD, "answer": "1e999"}, "`answer` '1e999' is not one number"),
        (
            {**GOOD, "answer": r"\frac{1}{", "verifier": "math"},
            r"`answer` '\\frac{1}{' cannot be read (a brace is never",
        ),
        (
            {**GOOD, "answer": r"\boxed{}", "verifier": "math"},
            r"`answer` '\\boxed{}' cannot be read",
        ),
        (
            {**GOOD, "answer": "$$", "verifier": "math"},
            "`answer` '$$' cannot be read (it is empty)",
        ),
        (
            {**GOOD, "answer": "1" * 2001, "verifier": "math"},
            f"`answer` '{'1' * 40}' has 2001 characters",
        ),
        (without("verifier"), "`verifier` is None: use exact, numeric, math"),
        ({**GOOD, "verifier": "maths"}, "`verifier` is 'maths': use exact, numeric, math"),
        ({**GOOD, "verifier": ["math"]}, "`verifier` is ['math']: use"),
        ({**GOOD, "metadata": 1}, "`metadata` must be an object"),
        ({**GOOD, "id": [1]}, "`id` must be a text or a whole number"),
    ],
)
def test_a_malformed_line_is_named_with_its_reason(tmp_path, line, reason):
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ValueError) as error:
        read_tasks(path)
    assert str(error.value).startswith(f"{path}:\n  line 2: {reason}")


def test_all_malformed_lines_are_reported_up_to_ten(tmp_path):
    wrong = {"prompt": "", "answer": "", "verifier": ""}
    with pytest.raises(ValueError) as error:
        read_tasks(write(tmp_path, *[wrong] * 12, GOOD))
    lines = str(error.value).splitlines()
    assert len(lines) == 12 and lines[-1] == "  and 2 more"
    assert lines[1].count(";") == 2  # everything that is wrong with the line


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1, "verifier": "math"}\r\n{"\xff"}')
    with pytest.raises(ValueError, match="line 2: is not UTF-8 \\(byte 3 of the line\\)"):
        read_tasks(path)


def test_an_empty_file_and_an_id_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no task: write one JSON object a line"):
        read_tasks(write(tmp_path, "", " "))
    with pytest.raises(ValueError, match="more than one task has the id 'a'"):
        read_tasks(write(tmp_path, {**GOOD, "id": "a"}, GOOD, {**GOOD, "id": "a"}))


@given(JSON)
def test_any_json_is_a_task_or_a_reason(value):
    line = json.dumps({**GOOD, **value} if isinstance(value, dict) else value).encode()
    try:
        assert parse_task(line, default_id="1").verifier == "numeric"
    except ValueError as error:
        assert str(error)


def test_every_task_once_an_epoch_and_graded_by_its_verifier():
    tokenizer = CharacterTokenizer("0123456789+?.", pad="?")
    codec = CharacterCodec(tokenizer, stop=".")
    tasks = [
        TextTask(id=str(i), prompt=f"{i}+{i}?", answer=str(2 * i), verifier="exact")
        for i in range(7)
    ]
    with Verifiers(RewardConfig()) as verify:
        source = JsonlSource(tasks[:5], held_out=tasks[5:], codec=codec, verify=verify, seed=3)
        epoch = [source.train(position) for position in range(5)]
        assert sorted(task.id for task in epoch) == list("01234")
        assert source.train(5 + 3) in tasks[:5] and source.train(3) == epoch[3]
        assert source.held_out(2) == tasks[5:]
        with pytest.raises(ValueError, match="3 held-out tasks are wanted, but --eval-tasks has 2"):
            source.held_out(3)
        environment = source.environment()
        assert tokenizer.decode(environment.reset(tasks[6])) == "6+6?"
        for said, reward in (("12.", 1), ("12", 1), ("13.", 0), (".", 0)):
            answer = environment.step(tokenizer.encode(said))
            assert (answer.reward, answer.done, list(answer.ids)) == (reward, True, [])


def test_a_gsm8k_record_becomes_a_task():
    record = {"question": "How many? ", "answer": "2*500 = <<2*500=1000>>1000\n#### 1,000"}
    assert task_of_gsm8k(record, instruction="") == {
        "prompt": "How many?",
        "answer": "1000",
        "verifier": "numeric",
        "metadata": {"source": "gsm8k", "solution": "2*500 = <<2*500=1000>>1000"},
    }
    assert task_of_gsm8k(record)["prompt"].startswith("How many?\nReason step by step")


def test_a_gsm8k_file_is_tasks_by_line_number(tmp_path):
    record = {"question": "How many?", "answer": "It is five.\n#### 5"}
    (task,) = read_gsm8k(write(tmp_path, "", record))
    assert (task.id, task.answer, task.verifier) == ("2", "5", "numeric")
    assert task.metadata == {"source": "gsm8k", "solution": "It is five."}


@pytest.mark.parametrize("record", [{}, {"question": "?", "answer": "5"}, {"question": "?"}, [1]])
def test_what_is_no_gsm8k_record_is_named(tmp_path, record):
    source = write(tmp_path, {"question": "?", "answer": "#### 1"}, record)
    with pytest.raises(ValueError, match="line 2: "):
        read_gsm8k(source)


@pytest.mark.skipif(not GSM8K.is_file(), reason="shared/data/gsm8k_train.jsonl is not there")
def test_all_of_gsm8k_is_read_and_its_solutions_are_right():
    tasks = read_gsm8k(GSM8K)
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    rewards = [numeric(s, answer=t.answer).reward for s, t in zip(solutions, tasks, strict=True)]
    assert sum(rewards) == len(tasks) == 7473


def test_a_character_tokenizer_has_no_chats():
    with pytest.raises(ValueError, match="has no chat format"):
        CharacterCodec(TOKENIZER, stop=".").encode(CHAT)
