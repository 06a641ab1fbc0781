"""A `Page` as one HTML file that asks nothing of the network: styles, script and pictures inside.

Light and dark follow the reader's system. Sliders are range inputs, so the arrow keys move them.
"""

from functools import cache
from pathlib import Path

import jinja2

from hyimg_cli.report.blocks import Page

_TEMPLATES = Path(__file__).parent / "templates"


def render(page: Page) -> str:
    """The whole HTML document. Every text of `page` is escaped."""
    return _environment().get_template("page.html").render(page=page)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
