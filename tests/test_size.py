"""The size of the project is bounded: code lines (without comments, docstrings and blank lines), files, and words of the docs.

A ceiling is the size when it was last lowered. What needs more first removes as much elsewhere, or raises it with a reason.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest
from processes import REPOSITORY

CEILINGS = {
    "code lines of app, launch and samerun": 24_950,
    "files of app, launch and samerun": 173,
    "code lines of tests": 22_350,
    "code lines of benchmarks": 1_200,
    "words of docs": 31_300,
}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(file: Path) -> int:
    text = file.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        node
        for holder in ast.walk(ast.parse(text))
        if isinstance(holder, documented)
        for node in holder.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]


SIZES = {
    "code lines of app, launch and samerun": sum(map(code_lines, files("app", "launch", "samerun"))),
    "files of app, launch and samerun": len(files("app", "launch", "samerun")),
    "code lines of tests": sum(map(code_lines, files("tests"))),
    "code lines of benchmarks": sum(map(code_lines, files("benchmarks"))),
    "words of docs": sum(
        len(page.read_text().split()) for page in (REPOSITORY / "docs").glob("**/[!_]*.md") if "_build" not in page.parts
    ),
}


@pytest.mark.parametrize("what", CEILINGS)
def test_a_size_is_below_its_ceiling(what: str) -> None:
    assert SIZES[what] <= CEILINGS[what], (
        f"{what}: {SIZES[what]:,}. Remove as much elsewhere, or raise the ceiling with a reason"
    )
