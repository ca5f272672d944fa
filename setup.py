"""Packaging. The pins live in requirements/; the extras name what each process needs."""

from pathlib import Path

from setuptools import find_packages, setup


def requirements(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, following `-r`."""
    lines: list[str] = []
    for line in (Path(__file__).parent / "requirements" / f"{name}.txt").read_text().splitlines():
        line = line.strip()
        if line.startswith("-r "):
            lines += requirements(line[3:].removesuffix(".txt"))
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


setup(
    name="nemo_style_rlhf",
    version="0.1.0",
    description="PPO for Hugging Face language models in two processes that speak only HTTP",
    long_description=(Path(__file__).parent / "README.md").read_text() if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["nemo_style_rlhf", "nemo_style_rlhf.*"]),
    package_data={"nemo_style_rlhf.evaluation": ["page.*"]},
    extras_require={
        "server": ["torch", *requirements("server")],
        "actor": ["torch", *requirements("actor")],
        "dev": requirements("dev"),
    },
)
