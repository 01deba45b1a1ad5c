"""From a record or a text to training samples.

Invariant the tests check: the trained tokens of a sample are those of the spans written by hand.
"""

from __future__ import annotations

import torch

from megatron_ext.data.config import TextUnit
from megatron_ext.data.records import Chat, Completion, Record
from megatron_ext.data.tokenizer import UNTRAINED, Passage, Tokenizer
from megatron_ext.packing.batch import Sample


def samples_of(record: Record, tokenizer: Tokenizer) -> list[Sample]:
    """The samples of a JSONL record: one, or several of a chat whose template rewrites turns.

    Raises:
        BadRecord: the chat template does not fit the chat.
    """
    match record:
        case Chat():
            return [to_sample(passages) for passages in tokenizer.encode_chat(record)]
        case Completion(prompt=prompt, completion=completion):
            before, after = tokenizer.encode_parts([prompt, completion])
            return [
                to_sample(
                    [
                        Passage(ids=[*tokenizer.start_ids, *before]),
                        Passage(ids=[*after, tokenizer.end_id], turn=0),
                    ]
                )
            ]
    ids = [*tokenizer.start_ids, *tokenizer.encode(record.text), tokenizer.end_id]
    return [_all_trained(ids)]


def samples_of_text(
    text: str, tokenizer: Tokenizer, *, unit: TextUnit, seq_length: int
) -> list[Sample]:
    """The samples of a .txt file: windows of seq_length tokens, or lines cut there.

    A window's last token is the first of the next one, so each token is predicted once.
    A line ends with a line feed; all other separators (U+2028, form feeds, ...) are text in it.
    """
    if unit == "line":
        lines = (line for line in text.split("\n") if line.strip())
        rows = [[*tokenizer.encode(line), tokenizer.end_id][:seq_length] for line in lines]
    else:
        ids = tokenizer.encode(text)
        rows = [ids[i : i + seq_length] for i in range(0, len(ids) - 1, seq_length - 1)]
    return [_all_trained(row) for row in rows if len(row) > 1]


def to_sample(passages: list[Passage]) -> Sample:
    """One sequence whose assistant turns are trained."""
    ids = [id for passage in passages for id in passage.ids]
    turns = [passage.turn for passage in passages for _ in passage.ids]
    turn_ids = torch.tensor(turns, dtype=torch.int64)
    return Sample(tokens=torch.tensor(ids), mask=turn_ids != UNTRAINED, turn_ids=turn_ids)


def _all_trained(ids: list[int]) -> Sample:
    """One sequence of which all but the first token are predicted and trained."""
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[0] = False
    return Sample(tokens=torch.tensor(ids), mask=mask)
