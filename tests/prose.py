"""Counts turns of phrase that a reader stumbles over, in documents, docstrings, comments and what programs print:

.venv-actor/bin/python -m tests.prose [FOLDER]    # another checkout
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

from tests.support.paths import ROOT

PHRASES = {
    "a relative clause after a comma": r",\s+which\b",
    "that of, those of": r"(?i)\b(?:that|those)\s+of\b",
    "X is no Y": r"(?i)(?<!there )\b(?:is|are|was|were)\s+no\s+(?!longer|more)\w",
    "beside": r"\bbeside\b",
    "alone": r"\balone\b",
    "goes on": r"\bgo(?:es)?\s+on\b",
    "Have X do": r"(?m)(?:^|[.:;]\s)Have\s+\w",
    "whoever, nobody, somebody": r"(?i)\b(?:whoever|nobody|somebody)\b",
    "Of, as a beginning": r"(?m)(?:^|\.\s)Of\s+(?:an?|the|each|every|this|all)\b",
    "a question as a beginning": r"\A\s*(?:What|How|Why|Whether|Which|Where|When|Who)\b",
    "a section as a beginning": r"\A\s*(?:Raises|Args|Returns):",
}
"""Regular expressions. Those of beginnings look at each docstring, the others at everything."""
WITHOUT = ("tests/", "benchmarks/", "requirements/")


def texts(root: Path) -> tuple[list[str], list[str]]:
    """All prose, and the docstrings of modules, classes and functions among it."""
    prose, docstrings = [], []
    files = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    for path in (root / file for file in files if not file.startswith(WITHOUT) and (root / file).is_file()):
        if path.suffix == ".md":
            prose.append(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
        elif path.suffix in (".yaml", ".sh"):
            prose.append("\n".join(re.findall(r"#\s?(.*)", path.read_text())))
        elif path.suffix == ".py":
            source = path.read_text()
            nodes = list(ast.walk(ast.parse(source)))
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            prose += [token.string[1:] for token in tokens if token.type == tokenize.COMMENT]
            prose += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            docstrings += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return prose, docstrings


def counts(root: Path) -> dict[str, int]:
    """How often each of :data:`PHRASES` stands in the files of a checkout that git knows."""
    prose, docstrings = texts(root)
    return {
        name: sum(len(re.findall(pattern, text)) for text in (docstrings if pattern.startswith(r"\A") else prose))
        for name, pattern in PHRASES.items()
    }


if __name__ == "__main__":
    for name, count in counts(Path(sys.argv[1]) if sys.argv[1:] else ROOT).items():
        print(f"{count:4} {name}")
