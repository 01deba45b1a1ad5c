"""Patches as rows of a table, applied in a context and undone after it.

A patch is the last resort (configuration value, spec, subclass come first).  Each row names its
target, the parameters the target had in the pinned Megatron, why it is needed and when it can go.
Invariant the tests check: after ``applied()`` every target is the object it was before; a missing
target or one whose parameters changed is refused before anything is replaced.
Not covered: threads that look at a target while another one enters or leaves the context.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced attribute."""

    target: str
    """``package.module:attribute.path``; a path through a class reaches the class's attributes."""
    replacement: Any
    params: tuple[str, ...] | None
    """Parameter names of the original; None for a value (module, flag, class without signature)."""
    why: str
    """What goes wrong without it."""
    remove_when: str
    """What has to change upstream before the row can go."""


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace every target for the duration of the block.

    A target that holds its replacement already (an enclosing block put it there) is left alone.

    Raises:
        RuntimeError: some target is missing or changed; all of them are listed, none is replaced.
    """
    rows = list(patches)
    problems = [text for text in (*map(problem, rows), *_duplicates(rows)) if text]
    if problems:
        raise RuntimeError(
            "the installed Megatron is not the one these patches were written for "
            "(megatron-core==0.19.2):\n  " + "\n  ".join(problems)
        )
    with ExitStack() as undo:
        for row in rows:
            owner, name = _owner_and_name(row.target)
            if _value(owner, name) is not row.replacement:
                _replace(owner, name, row.replacement, undo)
        yield


def problem(patch: Patch) -> str | None:
    """Why ``patch`` does not fit the installed Megatron, or None when it does."""
    try:
        owner, name = _owner_and_name(patch.target)
    except (ImportError, AttributeError) as error:
        return f"{patch.target}: {error}"
    value = _value(owner, name)
    if value is _MISSING:
        return f"{patch.target}: no such attribute"
    if patch.params is None or value is patch.replacement:
        return None
    try:
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
    except (TypeError, ValueError) as error:
        return f"{patch.target}: {error}; the patch was written for parameters {patch.params}"
    if found != patch.params:
        return f"{patch.target}: parameters are {found}, the patch was written for {patch.params}"
    return None


def _duplicates(rows: Iterable[Patch]) -> list[str]:
    counts = Counter(row.target for row in rows)
    return [f"{target}: {count} rows replace it" for target, count in counts.items() if count > 1]


def _owner_and_name(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _value(owner: Any, name: str) -> Any:
    """The attribute as stored (a class keeps its staticmethod wrapper), or ``_MISSING``."""
    namespace = vars(owner)
    return namespace[name] if name in namespace else getattr(owner, name, _MISSING)


def _replace(owner: Any, name: str, replacement: Any, undo: ExitStack) -> None:
    """Set the attribute; ``undo`` puts back the very object, or takes away what hid an inherited
    one."""
    original, is_own = _value(owner, name), name in vars(owner)
    setattr(owner, name, replacement)
    if is_own:
        undo.callback(setattr, owner, name, original)
    else:
        undo.callback(delattr, owner, name)
