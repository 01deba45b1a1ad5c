"""R10: whatever an environment or a reward does costs its own episode, at once, and is named."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from megatron_ext.environments.base import EpisodeLimits, EpisodeStart, Observation
from megatron_ext.environments.calls import TimedCalls
from megatron_ext.environments.runner import EpisodeRunner
from megatron_ext.environments.text import TextEnvironment
from megatron_ext.rewards.base import Verdict
from tests.environments.scripted import ScriptedGenerator

LIMITS = EpisodeLimits(max_new_tokens=20, max_context=30)
VOCABULARY = 38
TOO_LATE = 20.0
"""Seconds; calls have a time limit of 60, and take milliseconds."""


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


class MuteExit(SystemExit):
    """Neither can this one's."""

    def __str__(self):
        sys.exit("no text")


class NoBool:
    def __bool__(self):
        raise RuntimeError("neither true nor false")

    __eq__ = None


def raises(error):
    raise error


def deep():
    return deep()


def forks():
    """A process that is forked from a call ends by `os._exit`, as multiprocessing does."""
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    raise ValueError(f"the child ended with {os.waitstatus_to_exitcode(status)}")


ENDS = {
    "an exception": (lambda: raises(KeyError("key")), "KeyError: 'key' (test_bad_env"),
    "without a text": (lambda: raises(ValueError()), "ValueError (test_bad_environments.py:"),
    "a mute exception": (lambda: raises(Mute()), "Mute: its text cannot be had (test_bad"),
    "a mute exit": (lambda: raises(MuteExit()), "MuteExit: its text cannot be had (test_bad"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3 (test_bad_environments.py:"),
    "sys.exit without a status": (lambda: sys.exit(), "SystemExit (test_bad_environments.py:"),
    "os._exit": (lambda: os._exit(3), "EndsProcess: os._exit(3) would have ended the whole run ("),
    "os.abort": (lambda: os.abort(), "EndsProcess: os.abort() would have ended the whole run ("),
    "KeyboardInterrupt": (lambda: raises(KeyboardInterrupt("x")), "KeyboardInterrupt: x (test"),
    "GeneratorExit": (lambda: raises(GeneratorExit()), "GeneratorExit (test_bad_env"),
    "StopIteration": (lambda: next(iter(())), "StopIteration (test_bad_env"),
    "CancelledError": (lambda: raises(asyncio.CancelledError()), "CancelledError (test_bad"),
    "MemoryError": (lambda: bytearray(2**62), "MemoryError (test_bad_environments.py:"),
    "RecursionError": (deep, "RecursionError: maximum recursion depth exceeded (test_bad"),
    "a group": (lambda: raises(BaseExceptionGroup("all", [SystemExit(1)])), "BaseExceptionGroup"),
    "a fork": (forks, "ValueError: the child ended with 7"),
}
IDS = {
    "outside": ([1, 99999], "ValueError: the environment gave {} with token ids [99999], which "),
    "negative": ([-1], "ValueError: the environment gave {} with token ids [-1], which are not in"),
    "the first one outside": ([VOCABULARY], "ValueError: the environment gave {} with token ids"),
    "a huge one": ([10**30], "ValueError: the environment gave {} with token ids [1000000000"),
    "a fraction": ([1.5], "TypeError: the environment gave {} with 1.5, which are no token ids"),
    "a whole float": ([1.0], "TypeError: the environment gave {} with 1.0, which are no token"),
    "a bool": ([True], "TypeError: the environment gave {} with True, which are no token ids"),
    "numpy's bool": ([np.True_], "TypeError: the environment gave {} with np.True_, which are"),
    "no id": ([None], "TypeError: the environment gave {} with None, which are no token ids"),
    "a text in a list": (["a"], "TypeError: the environment gave {} with 'a', which are no token"),
    "None": (None, "TypeError: the environment gave {} as NoneType, not as a list of token ids"),
    "a text": ("abc", "TypeError: the environment gave {} as str, not as a list of token ids"),
    "a number": (3, "TypeError: the environment gave {} as int, not as a list of token ids"),
    "a generator": (
        (i for i in range(3)),
        "TypeError: the environment gave {} as generator, not as a list of token ids",
    ),
    "a set": ({3, 4}, "TypeError: the environment gave {} as set, not as a list of token ids"),
}
REWARDS = {
    **{f"{r}": r for r in (float("nan"), float("inf"), -float("inf"), 1e13, 10**400, "1", None)},
    **{f"{r}": r for r in (1j, [1.0], b"1", NoBool())},
}
DONE = {"None": None, "a text": "no", "a list": [], "an array": np.array([1, 0])}


@dataclass
class Task:
    """One of the tables' rows, and where it happens; None = nothing does."""

    id: str
    where: str = ""
    what: object = None
    metadata: dict = field(default_factory=dict)


def environment_of(*, is_instant):
    """A kind of environment that does what its task says."""
    instant = is_instant

    class Bad:
        is_instant = instant
        stop_ids = frozenset[int]()

        def reset(self, task, *, seed):
            self.task, self.turns = task, 0
            if task.where == "reset":
                task.what()
            return task.what if task.where == "prompt" else [1, 2]

        def step(self, sampled):
            self.turns += 1
            if self.task.where == "step":
                self.task.what()
            if self.task.where == "answer" and self.turns == 1:
                return Observation(ids=self.task.what)  # type: ignore[arg-type]
            if self.task.where == "observation":
                return self.task.what
            return Observation(reward=1.0, done=True)

    return Bad


def play(tasks, new_environment):
    """Its episodes, soon; all sequences are released."""
    generator = ScriptedGenerator(policy=lambda context: [5])
    started = time.monotonic()
    with TimedCalls(workers=2, time_limit=60.0) as timed:
        runner = EpisodeRunner(new_environment, limits=LIMITS, timed_calls=timed)
        starts = [EpisodeStart(task=task, group=i) for i, task in enumerate(tasks)]
        episodes = runner.run(generator, starts)
    assert time.monotonic() - started < TOO_LATE
    assert not generator.sequences
    return episodes


def reasons_of(tasks, *, is_instant):
    """Errors by id; every second episode is a good one, which must not notice."""
    mixed = [one for task in tasks for one in (task, Task(id="good"))]
    episodes = play(mixed, environment_of(is_instant=is_instant))
    assert [e.task_id for e in episodes] == [task.id for task in mixed]
    assert all(e.is_valid and e.reward == 1 for e in episodes[1::2])
    assert all(e.environment_seconds > 0 for e in episodes)
    return {e.task_id: e.error for e in episodes[::2]}


def assert_reasons(found, wanted):
    assert found.keys() == wanted.keys()
    for name, reason in wanted.items():
        assert (found[name] or "").startswith(reason), (name, found[name])


@pytest.mark.parametrize("is_instant", [True, False])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_r10_what_a_call_raises_costs_its_episode(where, is_instant):
    tasks = [Task(id=name, where=where, what=act) for name, (act, _) in ENDS.items()]
    found = reasons_of(tasks, is_instant=is_instant)
    assert_reasons(found, {name: reason for name, (_, reason) in ENDS.items()})


@pytest.mark.parametrize("is_instant", [True, False])
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_r10_wrong_ids_cost_their_episode(where, is_instant):
    tasks = [Task(id=name, where=where, what=ids) for name, (ids, _) in IDS.items()]
    found = reasons_of(tasks, is_instant=is_instant)
    wanted = {name: reason.format(f"the {where}") for name, (_, reason) in IDS.items()}
    assert_reasons(found, wanted)


@pytest.mark.parametrize("is_instant", [True, False])
def test_r10_wrong_rewards_and_ends_cost_their_episode(is_instant):
    tasks = [
        Task(id=name, where="observation", what=Observation(reward=reward, done=True))
        for name, reward in REWARDS.items()
    ] + [
        Task(id=f"done {name}", where="observation", what=Observation(done=done))
        for name, done in DONE.items()
    ]
    others = {"a generator": (o for o in ()), "None": None, "a tuple": ([1], 1.0, True)}
    tasks += [Task(id=f"all {name}", where="observation", what=o) for name, o in others.items()]
    found = reasons_of(tasks, is_instant=is_instant)
    for name, reward in REWARDS.items():
        assert "Error: " in found[name], (name, reward)
    for name in ("nan", "inf", "1", "None", "[1.0]"):
        assert f"the environment gave the reward {REWARDS[name]!r}, which is no" in found[name]
    assert "said done=None, neither True nor False" in found["done None"]
    assert "said done='no', neither" in found["done a text"]
    assert all("Error: " in str(found[f"done {name}"]) for name in DONE)
    assert "the environment answered generator, no Observation" in found["all a generator"]
    assert "the environment answered NoneType, no Observation" in found["all None"]


def test_numbers_of_other_libraries_are_welcome_and_become_plain():
    given = [np.int64(3), torch.tensor(4), 5]
    answers = [
        Observation(reward=np.float32(0.5), done=np.True_),  # type: ignore[arg-type]
        Observation(reward=torch.tensor(0.25), done=True),  # type: ignore[arg-type]
        Observation(reward=True, done=True),
    ]
    tasks = [
        Task(id="prompt", where="prompt", what=given),
        Task(id="array", where="prompt", what=np.array([3, 4])),
        Task(id="answer", where="answer", what=torch.tensor([3, 4])),
        *[Task(id="reward", where="observation", what=answer) for answer in answers],
    ]
    episodes = play(tasks, environment_of(is_instant=True))
    assert [e.error for e in episodes] == [None] * 6
    assert [e.reward for e in episodes] == [1, 1, 1, 0.5, 0.25, 1]
    assert {type(x) for e in episodes for x in [*e.ids, e.reward]} == {int, float}
    assert [e.ids for e in episodes[:3]] == [[3, 4, 5, 5], [3, 4, 5], [1, 2, 5, 3, 4, 5]]


@pytest.mark.parametrize("member", ["__init__", "is_instant", "stop_ids"])
def test_r10_members_that_raise_cost_their_episodes(member):
    class Half(environment_of(is_instant=True)):
        """One in two is broken from the start."""

        made = 0

        def __new__(cls):
            cls.made += 1
            return super().__new__(cls)

    def broken(self):
        if self.made % 2:
            sys.exit("in a member")
        return {"is_instant": True, "stop_ids": frozenset()}.get(member)

    setattr(Half, member, broken if member == "__init__" else property(broken))
    number = iter(range(4))

    def new():
        made = Half.__new__(Half)
        made.made = next(number)
        made.__init__()
        return made

    episodes = play([Task(id=str(i)) for i in range(4)], new)
    assert [e.is_valid for e in episodes] == [True, False, True, False]
    assert str(episodes[1].error).startswith("SystemExit: in a member (test_bad_env")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: os._exit(0), "EndsProcess: os._exit(0) would have ended the whole run (test_bad"),
        (lambda: sys.exit(0), "SystemExit: 0"),
        (lambda: raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: Verdict(reward=float("nan")), "ValueError: the environment gave the reward nan"),
    ],
)
def test_r10_a_reward_costs_its_episode(act, reason):
    """A grader of text, which is called in a thread."""

    class Codec:
        stop_ids = frozenset[int]()

        def encode(self, prompt):
            return [1, 2]

        def decode(self, ids):
            return "text"

    @dataclass
    class Asked(Task):
        prompt: str = "?"

    def grade(task, response):
        return act() if task.id == "bad" else Verdict(reward=1.0)

    bad, good = play(
        [Asked(id="bad"), Asked(id="good")],
        lambda: TextEnvironment(Codec(), grade),
    )
    assert str(bad.error).startswith(reason)
    assert good.is_valid and good.reward == 1
