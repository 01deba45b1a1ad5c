"""metrics.jsonl: one strict JSON object a step, appended and handed to the system at once.

Line: `{"step": 7, "loss": -0.25, "grad_norm": 1.5, ...}`, steps strictly increasing.  A value that
is not finite is `null`, and a second key says which: `"loss": null, "loss_nonfinite": "nan"` (or
"inf", "-inf").  A metric without a value at a step (None) is left out of its line.

Invariants: what is read back equals what was written; a killed process loses at most the line it
was writing; after a resume at step s the file is what an uninterrupted run would have written
(timings aside), because lines with step > s and a torn end are cut.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path

from megatron_ext.files.appended import AppendedFile
from megatron_ext.report.output_folder import replacing
from megatron_ext.report.sink import Number, Outcome

NONFINITE_SUFFIX = "_nonfinite"


def plain_metrics(metrics: Mapping[str, object]) -> dict[str, Number]:
    """The metrics as Python ints and floats, without those that are None (not measured).

    Takes int, float, bool and numpy scalars.  Raises ValueError naming every other one.
    """
    plain: dict[str, Number] = {}
    wrong = []
    for name, value in metrics.items():
        if name == "step" or name.endswith(NONFINITE_SUFFIX):
            wrong.append(f"the name {name!r} is reserved")
        elif isinstance(value, Integral):
            plain[name] = int(value)
        elif isinstance(value, Real):
            plain[name] = float(value)
        elif value is not None:
            wrong.append(f"{name!r} is a {type(value).__name__}")
    if wrong:
        raise ValueError(
            f"metrics must be int, float or None: {', '.join(wrong)}. "
            "Pass tensor.item() for a tensor, and another name for a reserved one."
        )
    return plain


def encode_record(step: int, metrics: Mapping[str, Number]) -> dict[str, object]:
    """The JSON object of one step."""
    record: dict[str, object] = {"step": step}
    for name, value in metrics.items():
        if math.isfinite(value):
            record[name] = value
        else:
            record[name] = None
            record[name + NONFINITE_SUFFIX] = str(value)
    return record


def decode_record(record: Mapping[str, object]) -> tuple[int, dict[str, Number]]:
    """Inverse of `encode_record`: (step, metrics)."""
    metrics: dict[str, Number] = {}
    for name, value in record.items():
        if name == "step" or name.endswith(NONFINITE_SUFFIX):
            continue
        value = record.get(name + NONFINITE_SUFFIX) if value is None else value
        metrics[name] = value if isinstance(value, int) else float(str(value))
    return int(str(record["step"])), metrics


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Number]]]:
    """(step, metrics) of every whole line; a torn end is passed over."""
    for _, record in _whole_lines(path):
        yield decode_record(record)


def cut_metrics(path: Path, *, last_step: int) -> int | None:
    """Remove the lines with step > last_step and a torn end; return the last step that is left."""
    kept = None
    with replacing(path) as file:
        for line, record in _whole_lines(path):
            if record["step"] > last_step:
                break
            file.write(line.rstrip("\r\n") + "\n")
            kept = record["step"]
    return kept


class MetricsFile:
    """Appends a line a step to metrics.jsonl; what the disk does not take is kept and tried again.

    resume_step: step of the checkpoint this process continues from; what lies after it is cut.
    None = start the file empty.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        self.last_step = None
        if resume_step is None:
            path.write_bytes(b"")
        elif path.exists():
            self.last_step = cut_metrics(path, last_step=resume_step)
        else:
            path.touch()
        self._file = AppendedFile(path)
        self._waiting: deque[tuple[int, bytes]] = deque()

    @property
    def waiting_steps(self) -> list[int]:
        """Steps that the disk has not taken yet."""
        return [step for step, _ in self._waiting]

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Append one line, after those that wait.  Raises OSError if the disk does not take it."""
        line = json.dumps(encode_record(step, metrics), allow_nan=False) + "\n"
        self._waiting.append((step, line.encode("ascii")))
        self._flush()

    def amend(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Replace the last line, which is of that step.  Raises OSError."""
        cut_metrics(self.path, last_step=step - 1)
        self.write(step, metrics)

    def close(self, outcome: Outcome) -> None:
        """Append what waits.  Raises OSError when the disk does not take it."""
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            step, line = self._waiting[0]
            try:
                self._file.append(line)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"step {step} cannot be appended to {self.path} ({error.strerror}). It is kept "
                    "in memory and written as soon as there is room",
                ) from error
            self._waiting.popleft()
            self.last_step = step


def _whole_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """(line, its object) up to a torn end; raises ValueError if whole lines follow a broken one."""
    broken = None
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is None:
                broken = broken or number
            elif broken is None:
                yield line, record
            else:
                raise ValueError(
                    f"{path}, line {broken}, is no metrics record though whole lines follow it: "
                    "the file was edited or damaged. Remove that line, or move the file away."
                )


def _parse(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None
