"""The documentation site: ``make docs`` builds it, and every warning is an error there."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extension")]

project = "nemo_style_rlhf"
author = "the nemo_style_rlhf authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "configuration_keys"]
exclude_patterns = ["_extension", "_static"]
html_theme = "furo"
html_title = "nemo_style_rlhf"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "monokai"

myst_heading_anchors = 4  # a link to page.md#heading is checked, as are links to pages and files

default_role = "code"  # docstrings put names in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
