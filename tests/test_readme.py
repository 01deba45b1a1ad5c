"""README and docs do not lie: the files, rooms and flags they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "CHANGELOG.md", "docs/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
PLACES = ("megatron_ext", "tests", "tools", "examples", "docs", "pretrain_rl.py")
NOT_OURS = {"--help", "--nproc-per-node", "--no-deps"}


def named_paths(text: str) -> set[str]:
    """Repository paths in back ticks or in shell commands."""
    words = re.findall(r"[`\s(]([\w./-]+)", text)
    return {
        word.rstrip(".,:")
        for word in words
        if word.split("/")[0] in PLACES and ("/" in word or word.endswith(".py"))
    }


def named_flags(text: str) -> set[str]:
    """Long options anywhere in the text."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - NOT_OURS


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_paths_exist(document: Path) -> None:
    for path in named_paths((ROOT / document).read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{document} names {path}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / document.parent / target).exists(), f"{document} links to {target}"


def test_named_flags_exist() -> None:
    from megatron_ext.upstream import arguments, mla_command

    parsers = arguments.build_parser(), mla_command.build_parser()
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tools/**/*.py"))
    for document in DOCUMENTS:
        for flag in named_flags((ROOT / document).read_text(encoding="utf-8")):
            assert flag in known or f'"{flag}"' in scripts, f"{document} names {flag}"


def test_examples_have_a_readme_and_a_command() -> None:
    for folder in (ROOT / "examples").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert (folder / "run.sh").is_file(), f"{folder.name} has no run.sh"
            assert (folder / "README.md").is_file(), f"{folder.name} has no README.md"
