"""The documentation builds as a site without a warning, documents every key, and needs no network."""

import html
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf import parts
from nemo_style_rlhf.launch.composition import CONF_DIR
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.schema.supervised import DPOConfig
from tests.support.browser import Browser
from tests.support.paths import ROOT

pytestmark = pytest.mark.more

OPTIONS = ["--fresh-env", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "html"]
"""Those of `make docs`."""


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", *OPTIONS, source, target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", target)
    assert done.returncode == 0, done.stderr
    assert " ".join(OPTIONS) in (ROOT / "Makefile").read_text()
    return target


def test_every_page_is_reached_from_the_first(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    found, waiting = set[Path](), [Path("index")]
    while waiting:
        page = waiting.pop()
        found.add(page)
        links = re.findall(r'href="([^"#:]+)\.html', (site / f"{page}.html").read_text())
        targets = {(site / page.parent / link).resolve().relative_to(site.resolve()) for link in links}
        waiting += targets - found - set(waiting) - {Path("genindex"), Path("search"), Path("py-modindex")}
    assert pages <= found and Path("reference/keys") in found and Path("reference/python") in found


@pytest.fixture(scope="module")
def entries(site: Path) -> dict[str, str]:
    """The text of each key's entries on the page of keys."""
    page = (site / "reference" / "keys.html").read_text()
    parts = re.findall(r'<dl class="std confval">(.*?)</dl>', page, re.DOTALL)
    texts = [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)).split()) for part in parts]
    found: dict[str, str] = {}
    for text in texts:
        name = text.partition(" ")[0]
        found[name] = found.get(name, "") + text
    return found


def leaves(schema: type) -> Iterator[str]:
    pending = [("", OmegaConf.structured(schema))]
    while pending:
        prefix, node = pending.pop()
        for key in node:
            inner = node._get_node(key)
            if OmegaConf.get_type(inner) is not dict and OmegaConf.is_dict(inner):
                pending.append((f"{prefix}{key}.", inner))
            else:
                yield f"{prefix}{key}"


@pytest.mark.parametrize("schema", [PPOActorConfig, PPOCriticConfig, DPOConfig])
def test_every_key_of_a_schema_has_an_entry(schema: type, entries: dict[str, str]) -> None:
    names = set(leaves(schema))
    assert len(names) > 30
    assert names - entries.keys() == set()


def test_every_key_is_documented(monkeypatch: pytest.MonkeyPatch, entries: dict[str, str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_extension")
    keys = importlib.import_module("configuration_keys").all_keys()
    assert {key.name for key in keys} == entries.keys()
    assert [key.name for key in keys if not key.text] == []


def test_defaults_are_those_that_programs_compose(entries: dict[str, str]) -> None:
    for default, programs in (
        ("1e-06", "train_ppo_actor, train_dpo, train_kto"),
        ("9e-06", "serve_ppo_critic"),
        ("2e-05", "train_sft"),
    ):
        assert f"float , default {default} (a number above 0), in {programs}." in entries["engine.optim.lr"]
    assert "str , required, in" in entries["model.path"]


def test_a_key_of_both_commands_for_a_pair_names_both(entries: dict[str, str]) -> None:
    assert entries["ranks"].endswith("in train_ppo_local, train_ppo_ray, plan.") and entries["device_gib"].endswith(
        "in plan."
    )


def test_every_program_and_preset_is_on_the_page_of_keys(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (site / "reference" / "keys.html").read_text()
    monkeypatch.syspath_prepend(ROOT / "docs" / "_extension")
    programs = importlib.import_module("configuration_keys").PROGRAMS
    files = {path.stem: path.read_text() for path in CONF_DIR.glob("*.yaml")}
    assert {name for name, _ in programs.values()} == {name for name in files if f"  - {name}_schema\n" in files[name]}
    assert [program for program in programs if program not in page] == []
    for preset in CONF_DIR.glob("*/*.yaml"):
        assert f"{preset.parent.name}={preset.stem}<" in page


def test_every_public_part_is_on_the_page_of_the_api(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    described = {name for name in parts.__all__ if not name.endswith("Config")}  # the page of keys has the others
    assert len(described) > 30
    assert [name for name in sorted(described) if not re.search(rf'id="[\w.]+\.{name}"', page)] == []


def test_the_site_loads_nothing_from_the_network(site: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        for page in ("index", "reference/keys", "debugging"):
            browser.open(site / f"{page}.html")
            assert browser.run("document.querySelector('h1') !== null")
        assert browser.problems == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[gone](gone.md)", "gone"),
        ("[gone](developing.md#gone)", "developing"),
        ("![gone](images/gone.png)", "image file not readable"),
    ],
)
def test_a_broken_link_fails_the_build(link: str, reason: str, tmp_path: Path) -> None:
    settings = (ROOT / "docs" / "conf.py").read_text()
    (tmp_path / "conf.py").write_text(f"import sys\nsys.path.append({str(ROOT / 'docs' / '_extension')!r})\n{settings}")
    shutil.copytree(ROOT / "docs" / "_static", tmp_path / "_static")
    (tmp_path / "developing.md").write_text("# Develop\n")
    (tmp_path / "index.md").write_text(f"# Start\n\n{link}\n\n```{{toctree}}\ndeveloping\n```\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1 and done.stderr.count("WARNING") == 1, done.stderr
    assert "index.md:3" in done.stderr and reason in done.stderr
