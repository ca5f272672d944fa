"""Writes the text of ``--help``, and of ``--help KEY``."""

import inspect
from collections.abc import Sequence

from nemo_style_rlhf.launch.composition import compose, presets
from nemo_style_rlhf.launch.interpreter import COMMAND
from nemo_style_rlhf.schema.documentation import describe
from nemo_style_rlhf.schema.programs import PROGRAMS

OPTIONS = {
    "--cfg job": "show the composed configuration",
    "--help KEY": "explain a key, or every key of a group such as run",
    "-m KEY=A,B": "one run for each value, one after the other, in folders of their own",
    "--config-name": "another file of conf/ (or of --config-dir)",
}


def help_text(script: str, about: str, *, dry_run: str, sweeps: bool) -> str:
    """The template of Hydra's help.

    Args:
        about: paragraphs about the program; the second one is its usage.
        dry_run: what ``--dry-run`` does after loading; empty for a program without one.
        sweeps: whether the program takes ``-m``.
    """
    purpose, usage, *notes = inspect.cleandoc(about).split("\n\n")
    usage += f"\n   or: {COMMAND}{script.replace('_', '-')}, from any folder, with the same arguments"
    options = {"--dry-run": f"load everything, {dry_run}, exit"} if dry_run else {}
    options |= {option: text for option, text in OPTIONS.items() if sweeps or option != "-m KEY=A,B"}
    listed = "\n".join(f"  {option:15}{text}" for option, text in options.items())
    groups = [f"  {group}: {', '.join(names)}" for group, (_, names) in presets(PROGRAMS[script][0]).items()]
    chosen = ["\n".join(["Presets (group=name):", *groups])] if groups else []
    paragraphs = [purpose, usage, listed, *notes, *chosen]
    return "\n\n".join([*paragraphs, "Configuration (documented in nemo_style_rlhf/schema/):\n$CONFIG"])


def describe_keys(script: str, keys: Sequence[str]) -> str:
    """The answer to ``--help KEY``.

    Raises:
        UserError: a key does not exist.
    """
    name, schema = PROGRAMS[script]
    composed = compose(name)
    return "\n".join(describe(schema, key, composed) for key in keys)
