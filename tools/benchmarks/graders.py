r"""The verifiers on right answers that are spelled otherwise and wrong ones that differ by little.

- respelled: an answer written in another way; must be paid.
- mutated: one sign, digit, base, unit, bracket or the order changed; must not be paid.
- numeric: GSM8K's own solutions (with --gsm8k).
- responses: MATH responses with stored scores (with --math-responses).
- table: Math-Verify's own cases (with --math-verify, a checkout of its repository).
Every wrong verdict is shown.
"""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

from megatron_ext.rewards.config import RewardConfig
from megatron_ext.rewards.math_answer import MathVerifier
from megatron_ext.rewards.plain_text import numeric
from tools.benchmarks import math_verify_table
from tools.benchmarks.grader_kinds import NUMBERS_AND_SETS, Kind, Parameters
from tools.benchmarks.grader_kinds_formulas import FORMULAS
from tools.benchmarks.grader_kinds_words import WITH_WORDS

ALL_KINDS = [*NUMBERS_AND_SETS, *FORMULAS, *WITH_WORDS]
_FRAMES = (
    "\\boxed{%s}",
    "So we get $\\boxed{%s}$.",
    "\\[\\boxed{%s}\\]",
    "\\boxed{%s.}",
    "\\boxed{ %s }",
    "\\boxed{$%s$}",
    "\\boxed{\\boxed{%s}}",
    "\\fbox{%s}",
    "First $\\boxed{0.123}$? No: \\boxed{%s}",
)
_SENTENCES = (
    "The final answer is $%s$.",
    "**Final Answer:** $%s$",
    "Hence the answer is:\n\n$$%s$$",
    "**Answer**: \\(%s\\)",
    "Final Answer: The final answer is $%s$. I hope it is correct.",
    "$%s$",
    "Answer: \\[%s\\]",
)


@dataclass(frozen=True, kw_only=True)
class GraderCase:
    """A response to grade."""

    kind: str
    gold: str
    response: str
    right: bool


def respelled(per_kind: int, *, seed: int = 0) -> Iterator[GraderCase]:
    """Right answers in all ways to write them, each in a frame of its own."""
    for kind in ALL_KINDS:
        rng = Random(f"{kind.name} {seed}")
        seen = set[str]()
        tries = 0
        while len(seen) < per_kind and tries < 20 * per_kind:
            tries += 1
            spellings = kind.spell(*kind.draw(rng))
            gold, answer = spellings[0], rng.choice(spellings)
            response = framed(answer, rng)
            if response not in seen:
                seen.add(response)
                yield GraderCase(kind=kind.name, gold=gold, response=response, right=True)


def mutated(per_kind: int, *, seed: int = 0) -> Iterator[GraderCase]:
    """Answers whose parameters mean something else than those of the known answer."""
    for kind in ALL_KINDS:
        rng = Random(f"{kind.name} {seed} mutated")
        drawable = _Drawable(kind)
        seen = set[tuple[str, str]]()
        for _ in range(20 * per_kind):
            if len(seen) == per_kind:
                break
            right = kind.draw(rng)
            wrong = drawable.mutant(right, rng)
            if wrong is None:
                continue
            known = kind.spell(*right)
            spellings = [text for text in kind.spell(*wrong) if text not in known]  # units may lack
            if not spellings:
                continue
            response = framed(rng.choice(spellings), rng)
            if (known[0], response) not in seen:
                seen.add((known[0], response))
                yield GraderCase(kind=kind.name, gold=known[0], response=response, right=False)


class _Drawable:
    """What parameters of a kind may be, learned from many draws."""

    def __init__(self, kind: Kind) -> None:
        rng = Random(kind.name)
        self._kind = kind
        self._draws = [kind.draw(rng) for _ in range(500)]
        columns = list(zip(*(d for d in self._draws if len(d) == len(self._draws[0])), strict=True))
        self._values = [set(column) for column in columns]
        pairs = [d[:2] for d in self._draws if len(d) > 1 and type(d[0]) is type(d[1])]
        self._is_rising = bool(pairs) and all(a < b for a, b in pairs)

    def mutant(self, right: Parameters, rng: Random) -> Parameters | None:
        """Parameters that differ in one place, or in their order, and in meaning."""
        for _ in range(30):
            wrong = list(right)
            at = rng.randrange(len(wrong))
            value = wrong[at]
            if isinstance(value, int):
                near = (value + 1, value - 1, -value, value + 10, 10 * value, _swapped(value))
                wrong[at] = rng.choice(near)
            elif len(right) == len(other := rng.choice(self._draws)):
                wrong[at] = other[at]
            if rng.random() < 0.2:
                wrong = list(right)
                rng.shuffle(wrong)
            if self._has(wrong, right) and self._kind.means(*wrong) != self._kind.means(*right):
                return tuple(wrong)
        return None

    def _has(self, wrong: list, right: Parameters) -> bool:
        for value, old, known in zip(wrong, right, self._values, strict=False):
            if type(value) is not type(old):
                return False
            if len(known) < 20 and value not in known:
                return False
            if isinstance(value, int) and not min(known) <= value <= max(known):
                return False
        distinct = len(set(wrong)) == len(wrong) or len(set(right)) < len(right)
        is_list = all(type(value) is int for value in wrong)
        return (not self._is_rising or wrong[0] < wrong[1]) and (distinct or not is_list)


def _swapped(value: int) -> int:
    digits = str(abs(value))
    return int(digits[::-1]) * (-1 if value < 0 else 1)


def framed(answer: str, rng: Random) -> str:
    """A response that states the answer."""
    in_box = "\\boxed{" in answer or rng.random() < 0.6
    return (
        rng.choice(_FRAMES[:3] if "\\boxed{" in answer else _FRAMES if in_box else _SENTENCES)
        % answer
    )


def of_golds(golds: Iterator[str]) -> Iterator[GraderCase]:
    """Respellings of real known answers that are plain numbers or fractions, and changed digits."""
    for gold in golds:
        value = _plain_value(gold)
        for old, new in (
            ("\\frac", "\\dfrac"),
            ("\\frac", "\\tfrac"),
            ("-", "-\\,"),
            ("{", "{ "),
            ("", ""),
        ):
            if old in gold and not (gold.endswith(".") and not old):
                answer = gold.replace(old, new) if old else gold + "."
                yield GraderCase(
                    kind="real", gold=gold, response=f"\\boxed{{{answer}}}", right=True
                )
        if value is not None and value.denominator == 1 and abs(value) >= 1000:
            for gap in (",", "{,}", "\\,", ",\\!", ""):
                answer = f"{int(value):,}".replace(",", gap)
                yield GraderCase(
                    kind="real", gold=gold, response=f"\\boxed{{{answer}}}", right=True
                )
        for at, character in enumerate(gold):
            answer = (
                gold[:at] + str((int(character) + 1) % 10) + gold[at + 1 :]
                if character.isdigit()
                else "-" + gold
            )
            if value is not None and value and _plain_value(answer) not in (None, value):
                yield GraderCase(
                    kind="real", gold=gold, response=f"\\boxed{{{answer}}}", right=False
                )


def _plain_value(text: str) -> Fraction | None:
    """The value of a number, fraction or mixed number; None = it is not written as one."""
    match = re.fullmatch(
        r"(-*)(?:(\d+)?\\frac\{(\d+)\}\{(\d+)\}|([\d,]+(?:\.\d+)?))", text.replace("{,}", ",")
    )
    if match is None or len(match[1]) > 1 or (match[4] is not None and int(match[4]) == 0):
        return None
    if match[5]:
        well_grouped = "," not in text or re.fullmatch(
            r"-?\d{1,3}(,\d{3})+", text.replace("{,}", ",")
        )
        return Fraction(text.replace("{,}", "").replace(",", "")) if well_grouped else None
    if match[2] and int(match[3]) >= int(match[4]):
        return None
    value = Fraction(int(match[3]), int(match[4])) + int(match[2] or 0)
    return -value if match[1] else value


def add_arguments(parser: ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--per-kind", type=int, default=160, help="cases of each kind and sort")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--gsm8k", type=Path, nargs="*", default=[], help="files in GSM8K's format")
    parser.add_argument("--math-responses", type=Path, help="JSONL with gt, code, score")
    parser.add_argument("--math-verify", type=Path, help="checkout of Math-Verify")


def run(options: Namespace) -> dict[str, object]:
    """Counts of cases and wrong verdicts, and milliseconds a grade."""
    figures: dict[str, object] = {}
    with MathVerifier(RewardConfig(math_workers=1)) as verify:
        verify(r"\boxed{x}", answer="5")  # the worker has started
        real = list(_real_golds(options))
        sorts = {
            "respelled": list(respelled(options.per_kind, seed=options.seed)),
            "mutated": list(mutated(options.per_kind, seed=options.seed)),
            "real answers": list(of_golds(iter(dict.fromkeys(real)))),
        }
        for name, cases in sorts.items():
            started = time.perf_counter()
            wrong = wrong_verdicts(cases, verify)
            seconds = time.perf_counter() - started
            figures |= {f"{name}: cases": len(cases), f"{name}: wrong verdicts": len(wrong)}
            figures[f"{name}: ms a grade"] = 1000 * seconds / max(1, len(cases))
            _show(f"{c.kind}: {c.response!r} {{{c.gold}}} right: {c.right:d}" for c in wrong)
        for path in options.gsm8k:
            figures |= _gsm8k(path)
        if options.math_responses:
            figures |= _responses(options.math_responses, verify)
        if options.math_verify:
            figures |= _table(options.math_verify, verify)
    return figures


def wrong_verdicts(cases: Iterable[GraderCase], verify: MathVerifier) -> list[GraderCase]:
    """The cases in which the verifier does not decide what is right."""
    return [c for c in cases if (verify(c.response, answer=c.gold).reward == 1) != c.right]


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"  {line}\n")


def _records(path: Path) -> Iterator[dict]:
    yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _real_golds(options: Namespace) -> Iterator[str]:
    for path in options.gsm8k:
        yield from (r["answer"].rpartition("####")[2].strip() for r in _records(path))
    if options.math_responses:
        yield from (record["gt"] for record in _records(options.math_responses))


def _gsm8k(path: Path) -> dict[str, object]:
    unpaid = [
        r
        for r in _records(path)
        if numeric(r["answer"], answer=r["answer"].rpartition("####")[2]).reward != 1
    ]
    _show(record["answer"][-80:] for record in unpaid)
    return {f"{path.name}: solutions not paid": len(unpaid)}


def _responses(path: Path, verify: MathVerifier) -> dict[str, object]:
    total, differing = 0, []
    for record in _records(path):
        for response, score in zip(record["code"], record["score"], strict=True):
            total += 1
            verdict = verify(response, answer=record["gt"])
            if verdict.reward != score:
                differing.append(f"{{{record['gt']}}} {verdict.answer}: stored score {score}")
    _show(differing)
    return {"responses: graded": total, "responses: other than stored": len(differing)}


def _table(checkout: Path, verify: MathVerifier) -> dict[str, object]:
    cases = math_verify_table.read_cases(checkout)
    found = math_verify_table.compare(cases, lambda r, g: verify(r, answer=g).reward)
    _show(found.worse)
    return {
        "table: cases": len(cases),
        "table: right": {"Math-Verify": found.right_alone, "ours": found.right_ours},
        "table: worse, unlisted": len([w for w in found.worse if not found.is_known(w)]),
    }
