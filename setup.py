"""Packaging. The pins live in requirements/; the extras name what each process needs."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, following `-r`."""
    lines: list[str] = []
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        line = line.strip()
        if line.startswith("-r "):
            lines += requirements(line[3:].removesuffix(".txt"))
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


def commands() -> list[str]:
    """One console command per script, running the same function: nsr-train-sft for trainers/train_sft.py."""
    scripts = sorted([*(ROOT / "servers").glob("*.py"), *(ROOT / "trainers").glob("*.py")])
    return [f"nsr-{script.stem.replace('_', '-')} = nemo_style_rlhf.programs:{script.stem}" for script in scripts]


setup(
    name="nemo_style_rlhf",
    version="0.1.0",
    description="PPO for Hugging Face language models in two processes that speak only HTTP",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["nemo_style_rlhf", "nemo_style_rlhf.*"]), "nemo_style_rlhf.conf"],
    package_dir={"nemo_style_rlhf.conf": "conf"},
    package_data={
        "nemo_style_rlhf.conf": ["*.yaml", "*/*.yaml"],
        "nemo_style_rlhf.watch": ["page/*", "page/*/*"],
    },
    entry_points={"console_scripts": commands()},
    extras_require={
        "server": ["torch", *requirements("server")],
        "actor": ["torch", *requirements("actor")],
        "dev": requirements("dev"),
    },
)
