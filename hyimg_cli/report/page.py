"""Pages from templates: HTML with styles and scripts inside, which needs no network.

Light and dark follow the reader's system. Sliders are range inputs, so the arrow keys move them.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **content: Any) -> str:
    """Return a whole document; in `.html` templates, all text in `content` is escaped."""
    return _environment().get_template(template).render(content)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": number,
        "percent": _percent,
        "settings": _settings,
        "spread": _spread,
    }
    return environment


def number(value: float | str | None, form: str) -> str:
    """Return a figure in this format; None as a dash, a text such as "inf" unchanged."""
    return "–" if value is None else value if isinstance(value, str) else format(value, form)


def _percent(value: float, top: float) -> str:
    """Return a value as a CSS length; `top` is the whole width."""
    return f"{max(value, 0.0) / top * 100 if top else 0:.3f}%"


def _spread(seconds: Mapping[str, Any]) -> str:
    """Return a median with its range; one run has no range."""
    median, low, high = (_digits(seconds[name]) for name in ("median", "min", "max"))
    return f"{median} s" if seconds["n"] < 2 else f"{median} s ({low} to {high})"


def _digits(seconds: float) -> str:
    """Return seconds with three digits, and none beyond the microsecond."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") if abs(seconds) < 1e-3 else f"{seconds:.3g}"


def _settings(values: Mapping[str, Any], sign: str = " = ") -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())
