"""Documentation of the running Python as a corpus: about 2 MB of English that is on every machine.

The topics of `help()` and the docstrings of the standard library. Sources are parsed, never imported:
importing `this` or `antigravity` has effects, and some modules exist on one platform only.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from sharebert.data.format import DataError

_SKIPPED_FOLDERS = {"__pycache__", "test", "tests", "idle_test", "turtledemo", "site_packages"}
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def standard_library() -> Path:
    """The folder that holds the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(folder: Path) -> list[Path]:
    """Module files below `folder`, in a fixed order, without tests and installed packages.

    Raises:
        DataError: there are none (a Python that ships only compiled files).
    """
    found = []
    for parent, folders, names in os.walk(folder):
        # Only what could be a package: leaves out `site-packages`, `config-3.11-...` and hidden folders.
        folders[:] = sorted(name for name in folders if name.isidentifier() and name not in _SKIPPED_FOLDERS)
        modules = (name for name in sorted(names) if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [Path(parent, name) for name in modules]
    if not found:
        raise DataError(f"{folder}: no .py files; data.source=python_docs needs them, use data.source=text_files")
    return found


def content_hash(folder: Path) -> tuple[str, int]:
    """(sha256 over the Python version, names and bytes of the files; bytes in all). About 0.1 s."""
    digest, num_bytes = hashlib.sha256(platform.python_version().encode()), 0
    for path in python_files(folder):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        num_bytes += len(data)
    return digest.hexdigest(), num_bytes


def read_documents(folder: Path) -> Iterator[str]:
    """The documents: each topic; each class with its methods; what else a module documents."""
    return iter(_documents(folder))


@functools.lru_cache(maxsize=1)
def _documents(folder: Path) -> tuple[str, ...]:
    """Kept, because preparation reads its source twice and parsing takes seconds (2 MB stay in memory)."""
    documents: list[str] = []
    for path in python_files(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escape sequences
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # templates that are not Python
                continue
        is_topics = path.parent.name == "pydoc_data" and path.name == "topics.py"
        documents += _topics(tree) if is_topics else _module_documents(tree)
    return tuple(documents)


def _topics(tree: ast.Module) -> list[str]:
    """The values of `topics = {...}`, the texts behind `help("assert")` and the like."""
    dictionaries = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return [text for node in dictionaries for text in ast.literal_eval(node).values()]


def _module_documents(tree: ast.Module) -> list[str]:
    """One document for the module and its functions, one for each class: neither one line nor a whole book."""
    documents: list[list[str]] = [[]]

    def visit(node: ast.AST, document: list[str]) -> None:
        if isinstance(node, ast.ClassDef):
            documents.append(document := [])
        if isinstance(node, _Documented):
            docstring = ast.get_docstring(node)
            document += [docstring] if docstring else []
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # a docstring is never below an expression
                visit(child, document)

    visit(tree, documents[0])
    return ["\n\n".join(docstrings) for docstrings in documents if docstrings]
