"""The rules of the code base, as functions from a file's text to what breaks them.

Each returns strings "LINE: what is wrong", empty for a file that keeps the rule.
Not covered: what a name or a string only becomes at run time.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import PurePosixPath

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 70
CATCH_ALL = {"Exception", "BaseException"}
IMPORT_FUNCTIONS = {"import_module", "__import__", "find_spec", "importorskip"}
NOT_TO_BE_FAKED = {"torch", "megatron"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a file, which nearly every rule walks."""
    return ast.parse(source)


def imports(source: str, *, package: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, anywhere in it; `from a import b` is a.b.

    package: of the file, to resolve relative imports.
    """
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1]
                prefix = ".".join([*(parents if level else []), *([module] if module else [])])
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if last_name(node.func) in IMPORT_FUNCTIONS:
                    yield node.lineno, name


def last_name(node: ast.AST) -> str:
    """`c` of the expressions c and a.b.c, else empty."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def first_name(node: ast.AST) -> str:
    """`a` of the expressions a and a.b.c, else empty."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def is_in(name: str, module: str) -> bool:
    """Whether a dotted name is the module or lies in it."""
    return f"{name}.".startswith(f"{module}.")


def package_of(path: str) -> str:
    """Package of the file `megatron_ext/room/file.py`: megatron_ext.room."""
    return ".".join(PurePosixPath(path).parent.parts)


def room_of(path: str) -> str:
    """Room of the file `megatron_ext/room/...`; empty directly under megatron_ext."""
    return (*PurePosixPath(path).parent.parts, "")[1]


def megatron_imports(source: str) -> list[str]:
    """Imports of Megatron, which only the room `upstream` may have."""
    found = [(line, name) for line, name in imports(source) if is_in(name, "megatron")]
    return [f"{line}: imports {name} outside megatron_ext/upstream" for line, name in found]


def imports_of_higher_rooms(source: str, *, path: str) -> list[str]:
    """Imports of a room above the file's own: upstream is above rl, and rl above all others."""
    above = {"upstream": (), "rl": ("upstream",)}.get(room_of(path), ("upstream", "rl"))
    return [
        f"{line}: {path} imports {name}, of a higher room"
        for line, name in imports(source, package=package_of(path))
        if any(is_in(name, f"megatron_ext.{room}") for room in above)
    ]


def circle_of_rooms(sources: Mapping[str, str]) -> list[str]:
    """Rooms that import each other in a circle; sources: the files of megatron_ext, by path."""
    rooms = {room_of(path) for path in sources} - {""}
    graph: dict[str, set[str]] = {room: set() for room in rooms}
    for path, source in sources.items():
        for _, name in imports(source, package=package_of(path)):
            used = next((room for room in rooms if is_in(name, f"megatron_ext.{room}")), "")
            if used and room_of(path) not in ("", used):
                graph[room_of(path)].add(used)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def forbidden_names(path: str) -> list[str]:
    """Folders and files named after no idea."""
    bad = FORBIDDEN_NAMES.intersection((*PurePosixPath(path).parts, PurePosixPath(path).stem))
    return [f"0: {name!r} names no idea" for name in sorted(bad)]


def too_many_lines(source: str) -> list[str]:
    """Files that cannot be read in one go."""
    lines = len(source.splitlines())
    return [f"{lines}: more than {MAX_FILE_LINES} lines"] if lines > MAX_FILE_LINES else []


def long_functions(source: str) -> list[str]:
    """Functions that do not fit a screen."""
    functions = [node for node in ast.walk(parsed(source)) if isinstance(node, Function)]
    lengths = [(f, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [
        f"{f.lineno}: {f.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
        for f, length in lengths
        if length > MAX_FUNCTION_LINES
    ]


def prints(source: str) -> list[str]:
    """Calls of print, which a library leaves to its tools."""
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
    return [f"{call.lineno}: print" for call in calls if getattr(call.func, "id", "") == "print"]


def catches_all(source: str) -> list[str]:
    """Handlers that catch whatever happens, and so hide the unexpected."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.ExceptHandler(type=None):
                found.append(f"{node.lineno}: bare except")
            case ast.ExceptHandler(type=ast.Tuple(elts=caught)):
                found += [
                    f"{node.lineno}: except {last_name(c)}" for c in caught if is_catch_all(c)
                ]
            case ast.ExceptHandler(type=ast.expr() as caught) if is_catch_all(caught):
                found.append(f"{node.lineno}: except {last_name(caught)}")
            case ast.Call(func=function, args=caught) if last_name(function) == "suppress":
                found += [
                    f"{node.lineno}: suppress({last_name(c)})" for c in caught if is_catch_all(c)
                ]
    return found


def is_catch_all(node: ast.AST) -> bool:
    """Whether an expression names Exception or BaseException."""
    return last_name(node) in CATCH_ALL


def mocks(source: str) -> list[str]:
    """Mock libraries, and pytest's monkeypatch applied to torch or Megatron."""
    found = [
        f"{line}: imports {name}"
        for line, name in imports(source)
        if any(is_in(name, module) for module in ("unittest.mock", "mock", "pytest_mock"))
    ]
    tree = parsed(source)
    real = names_of_real_modules(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == "mocker":
            found.append(f"{node.lineno}: the fixture mocker")
        if isinstance(node, ast.Call) and first_name(node.func) in ("monkeypatch", "mp"):
            texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
            fakes = [t for t in texts if isinstance(t, str) and t.split(".")[0] in NOT_TO_BE_FAKED]
            if fakes or any(first_name(argument) in real for argument in node.args[:1]):
                found.append(f"{node.lineno}: monkeypatch of torch or Megatron")
    return found


def names_of_real_modules(tree: ast.AST) -> set[str]:
    """Names that a file binds to torch, Megatron or something in them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                if (module or alias.name).split(".")[0] in NOT_TO_BE_FAKED:
                    names.add(alias.asname or alias.name.split(".")[0])
    return names


def loose_options(source: str) -> list[str]:
    """Dataclasses that are not frozen and keyword-only, and their fields without a help text."""
    found = []
    for node in ast.walk(parsed(source)):
        decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
        for decorator in decorators:
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            if isinstance(node, ast.ClassDef) and last_name(call.func) == "dataclass":
                if {"frozen", "kw_only"} - {k.arg for k in call.keywords if is_true(k.value)}:
                    found.append(f"{node.lineno}: {node.name} is not frozen and kw_only")
                found += [f"{line}: field {name} has no text" for line, name in bare_fields(node)]
    return found


def is_true(node: ast.AST) -> bool:
    """Whether an expression is the word True."""
    return isinstance(node, ast.Constant) and node.value is True


def bare_fields(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """(line, name) of annotated fields that no string follows."""
    for statement, following in pairwise([*node.body, ast.Pass()]):
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.dump(
            statement.annotation
        ):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    pass
                case _:
                    yield statement.lineno, ast.unparse(statement.target)


def trusting_loads(source: str) -> list[str]:
    """Calls of transformers that could run code from a folder, or look for one on the network."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and last_name(node.func) == "from_pretrained":
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if given.get("trust_remote_code") is not False or not given.get("local_files_only"):
                found.append(f"{node.lineno}: from_pretrained may run code or ask the network")
    return found


def assignments_into_args(source: str) -> list[str]:
    """Values put into the parsed arguments, which others take for what the user said."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del(), attr=name):
                if last_name(owner) == "args":
                    found.append(f"{node.lineno}: changes args.{name}")
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                if last_name(owner) == "args":
                    found.append(f"{node.lineno}: changes args")
    return found


def missing_docstrings(source: str) -> list[str]:
    """Modules, and their public functions and classes, without a docstring."""
    tree = parsed(source)
    public = [
        node
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    found = [] if ast.get_docstring(tree) else ["1: the module has no docstring"]
    return found + [
        f"{node.lineno}: {node.name} has no docstring"
        for node in public
        if not ast.get_docstring(node)
    ]
