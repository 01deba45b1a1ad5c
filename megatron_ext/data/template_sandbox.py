"""Jinja as chat templates expect it: transformers' environment, for templates that nobody trusts.

The sandbox keeps a template from Python's internals and has no loader, so that nothing is imported
or included.  It limits neither time nor memory: `template_worker.py` does.
Invariant the tests check: texts and {% generation %} blocks are those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,
    OSError,
    ImportError,
)
"""What a template raises that is none, or for a chat that it does not expect."""
_DRAWN = "_drawn_blocks"


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant generated."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call, so that its text is known when it is written."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_note", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _note(context: Context, caller: Macro) -> str:
        text = caller()
        context[_DRAWN](text)
        return text


class _PlainNamespace(Namespace):
    """Jinja's, of which no name begins with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name}")
        super().__setitem__(name, value)


def compiled(source: str) -> Template:
    """The template of a source; raises one of REFUSALS where it is none."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "namespace": _namespace,
    }
    return environment.from_string(source)


def render(template: Template, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where its {% generation %} blocks start and end."""
    written: list[str] = []
    spans: list[tuple[int, int]] = []

    def note(text: str) -> None:
        start = sum(map(len, written))
        spans.append((start, start + len(text)))

    written_by: Callable[..., Any] = template.generate
    for piece in written_by(**variables, **{_DRAWN: note}):
        written.append(piece)
    return "".join(written), spans


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes that Jinja's own filter writes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _namespace(*args: Any, **values: Any) -> Namespace:
    made = _PlainNamespace()
    for name, value in dict(*args, **values).items():
        made[name] = value
    return made
