r"""An answer's text as tokens: numbers, letters, commands, words, separators.

A comma between digits is a thousands separator (`1,234`) unless the number stands in brackets,
where `(1,234)` is a pair; there it is one only if the next group begins with 0, which no number
does (`\{1,000\}`), or if other commas of the brackets have a space after them.
Letters in a row are a word if they are a unit, or long (`12 apples`); else a product (`xy`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.rewards.formula.nodes import BrokenFormula, UnknownFormula
from megatron_ext.rewards.formula.units import is_unit

_FUNCTION_NAMES = """sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth ln log lg exp
gcd lcm cis"""
_SPACE_NAMES = """left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle
displaystyle textstyle scriptstyle limits nolimits boxed fbox mathstrut hfill thinspace"""
_STYLE_NAMES = "mathbf mathit mathsf mathcal boldsymbol bm vec overrightarrow mathnormal"
_TEXT_NAMES = """text textbf textit textrm textsf texttt mbox hbox mathrm rm operatorname textnormal
emph mathtt textup"""
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_PLAIN_COMMANDS = FUNCTIONS | {"pi", "sqrt", "theta", "alpha", "beta", "infinity", "infty", "oo"}
_SPACES, _STYLES, _TEXTS = (
    frozenset(names.split()) for names in (_SPACE_NAMES, _STYLE_NAMES, _TEXT_NAMES)
)
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne",
    "ast": "cdot", "lor": "vee", "lbrace": "{", "rbrace": "}", "lvert": "|", "rvert": "|",
    "vert": "|", "mid": "|", "varnothing": "emptyset", "backslash": "setminus", "inf": "infty",
    "oo": "infty", "infinity": "infty", "colon": ":", "lbrack": "[", "rbrack": "]", "lg": "log",
    "degree": "circ", "doteq": "=", "simeq": "approx", "varphi": "phi", "varepsilon": "epsilon",
    "imath": "i", "bigcup": "cup", "lnot": "neg", "qquad": "quad", "prime": "'",
}  # fmt: skip
_MAX_TOKENS = 2000
_BASE = re.compile(
    r"(?:(?=[A-Z]*\d)([0-9A-Z]+(?:\.\d+)?)|\(([0-9A-Z]+)\))\s*_\s*"
    r"(?:\{\s*(?:\\text\s*\{\s*)?(\d{1,2}|[a-z]{3,8})\s*\}?\s*\}"
    r"|(\d{1,2})|\\text\s*\{\s*([a-z]{3,8})\s*\})(?![\w.])"
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_GROUPED = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?![\d])(?!,\d)(?:\.\d+)?")
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_LETTERS = re.compile(r"[a-zA-Z]+")
_WORD = re.compile(r"and|or|[,;&]|[^\s,;&]+")
_LIST_COMMA = re.compile(r",\s|,\\")
_SHORT_UNITS = {"cm", "mm", "km", "kg", "ft", "oz", "lb", "hr", "yd", "mg", "ml"}
_VOWEL = re.compile(r"[aeiouAEIOU]")
_TWO = ("<=", ">=", "!=", "||")
_TWO_NAMES = {"<=": "le", ">=": "ge", "!=": "ne"}


class Token(NamedTuple):
    """kind: number, letter, command (its name), sign (one character), text, base, separator."""

    kind: str
    value: str
    spaced: bool = False
    """Whether white space stands before it."""


@dataclass
class _Scanner:
    text: str
    at: int = 0
    spaced: bool = False

    def group(self) -> str:
        """Content of the braces that open here, which are passed; or the next token's text."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if self.text[self.at : self.at + 1] != "{":
            match = _COMMAND.match(self.text, self.at) or re.compile(r"\w").match(
                self.text, self.at
            )
            if match is None:
                raise BrokenFormula("a command lacks its argument")
            self.at = match.end()
            return match.group()
        depth, start = 0, self.at + 1
        while self.at < len(self.text):
            character = self.text[self.at]
            depth += (character == "{") - (character == "}")
            self.at += 2 if character == "\\" else 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise BrokenFormula("a brace is never closed")


def tokens(text: str) -> list[Token]:
    """The tokens of a text in one spelling (`spelled`).

    Raises:
        BrokenFormula: braces do not match, or a command lacks its argument.
        UnknownFormula: it is too long, or holds a character that no answer has.
    """
    _check_braces(text)
    scanner = _Scanner(text)
    found: list[Token] = []
    brackets: list[int] = []
    while scanner.at < len(text):
        if text[scanner.at].isspace() or text[scanner.at] == "~":
            scanner.at += 1
            scanner.spaced = True
            continue
        found.extend(_next(scanner, brackets))
        scanner.spaced = False
        if len(found) > _MAX_TOKENS:
            raise UnknownFormula("it is too long")
    return found


def _check_braces(text: str) -> None:
    depth = position = 0
    while position < len(text):
        character = text[position]
        depth += (character == "{") - (character == "}")
        if depth < 0:
            raise BrokenFormula("a brace is closed that was never opened")
        position += 2 if character == "\\" else 1
    if depth:
        raise BrokenFormula("a brace is never closed")


def _next(scanner: _Scanner, brackets: list[int]) -> list[Token]:
    text, at, spaced = scanner.text, scanner.at, scanner.spaced
    if base := _BASE.match(text, at):
        scanner.at = base.end()
        return [Token("base", "_".join(part for part in base.groups() if part), spaced)]
    if text[at].isdigit() or text[at] == ".":
        return [_number(scanner, brackets)]
    if text[at].isascii() and text[at].isalpha():
        return _letters(scanner)
    if text[at] == "\\":
        return _command(scanner, brackets)
    if text[at : at + 2] in _TWO:
        scanner.at += 2
        name = _TWO_NAMES.get(text[at : at + 2])
        return [Token("command", name, spaced) if name else Token("sign", "||", spaced)]
    scanner.at += 1
    if text[at] in "([":
        brackets.append(at)
    elif text[at] in ")]" and brackets:
        brackets.pop()
    if text[at] in ",;":
        return [Token("separator", text[at])]
    if text[at] in "+-*/^_=<>!|:()[]{}'%&":
        return [Token("sign", text[at], spaced)]
    raise UnknownFormula(f"{text[at]!r} has no meaning here")


def _number(scanner: _Scanner, brackets: list[int]) -> Token:
    grouped = _GROUPED.match(scanner.text, scanner.at)
    if grouped and (not brackets or _is_grouped(scanner.text, brackets[-1], grouped.group())):
        scanner.at = grouped.end()
        return Token("number", grouped.group().replace(",", ""), scanner.spaced)
    match = _NUMBER.match(scanner.text, scanner.at)
    if match is None:
        raise UnknownFormula("a full stop stands where no number begins")
    scanner.at = match.end()
    return Token("number", match.group(), scanner.spaced)


def _is_grouped(text: str, opening: int, number: str) -> bool:
    closing = min((i for c in ")]}" if (i := text.find(c, opening)) >= 0), default=len(text))
    return ",0" in number or bool(_LIST_COMMA.search(text, opening, closing))


def _letters(scanner: _Scanner) -> list[Token]:
    match = _LETTERS.match(scanner.text, scanner.at)
    assert match is not None
    run, spaced = match.group(), scanner.spaced
    scanner.at = match.end()
    if run in ("and", "or"):
        return [Token("separator", run)]
    if run in _PLAIN_COMMANDS:
        return [Token("command", _RENAMED.get(run, run), spaced)]
    before = scanner.text[: match.start()].rstrip()[-1:]
    if before not in ("_", "^") and _is_word(run, after_number=spaced and before.isdigit()):
        return [Token("text", run, spaced)]
    return [Token("letter", c, spaced and not i) for i, c in enumerate(run)]


def _is_word(run: str, *, after_number: bool) -> bool:
    if is_unit(run):
        return len(run) > 2 or run in _SHORT_UNITS or after_number
    return len(run) > 3 and bool(_VOWEL.search(run))


def _command(scanner: _Scanner, brackets: list[int]) -> list[Token]:
    match = _COMMAND.match(scanner.text, scanner.at)
    if match is None:
        raise BrokenFormula("it ends in a backslash")
    spaced = scanner.spaced
    scanner.at = match.end()
    name = _RENAMED.get(match[1], match[1])
    if match[1] in ",!;: \n" or name in _SPACES:
        if match[1] in ("left", "right") and scanner.text[scanner.at :].lstrip()[:1] == ".":
            scanner.at = scanner.text.index(".", scanner.at) + 1
        return []
    if name.startswith("quad"):
        scanner.at -= len(name) - len("quad")  # \\quadx is a slip of the pen
        return [Token("separator", "quad")]
    if name == "hspace" or name == "phantom":
        scanner.group()
        return []
    if name in _STYLES:
        return tokens(scanner.group())
    if name in _TEXTS:
        return _text(scanner.group(), is_roman=name in ("mathrm", "rm", "operatorname"))
    if name in ("overline", "bar", "hat", "widehat", "tilde", "underline", "dot"):
        return [Token("letter", f"{name} {_plain(scanner.group())}", spaced)]
    if name == "mathbb":
        return [Token("command", f"mathbb{_plain(scanner.group())}", spaced)]
    if name == "mathbbR":
        return [Token("command", name, spaced)]
    if name == "begin":
        return [Token("command", f"begin {_plain(scanner.group())}", spaced)]
    if name == "end":
        return [Token("command", f"end {_plain(scanner.group())}", spaced)]
    if name == "{":
        brackets.append(scanner.at - 1)
    elif name == "}" and brackets:
        brackets.pop()
    if name in ("<", ">", "|", "[", "]", ":", "=", "'", "%", "&"):
        return [Token("sign", name, spaced)]
    return [Token("letter", "i", spaced)] if name == "i" else [Token("command", name, spaced)]


def _plain(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _text(content: str, *, is_roman: bool) -> list[Token]:
    """Tokens of words: separators, single letters and numbers count as such."""
    content = re.sub(r"\\[,;:! ]|~", " ", content).strip()
    if content in FUNCTIONS or content == "sqrt":
        return [Token("command", content)]
    if (
        re.fullmatch(r"[\d.,]*\d", content)
        or content in ("e", "i")
        or (is_roman and len(content) == 1)
    ):
        return tokens(content)
    if is_roman and re.search(r"[\\^_{}]", content):
        return tokens(re.sub(r"([a-zA-Z]+)", r"\\text{\1}", content)) if "\\" not in content else []
    if re.search(r"[\\$^{}]", content):
        raise UnknownFormula("a formula stands within words")
    found: list[Token] = []
    words: list[str] = []
    for word in [*_WORD.findall(content), ","]:
        if word in ("and", "or", ",", ";", "&"):
            if words:
                found.append(Token("text", " ".join(words), True))
            found.append(Token("separator", word))
            words = []
        else:
            words.append(word)
    return found[:-1]
