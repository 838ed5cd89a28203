"""Help texts: keys with their types, defaults and what they are for."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping
from typing import Any


def described(
    keys: Mapping[str, tuple[str, Any, str]], choices: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Return lines on every key, as `sweeps.spec.keys` gives them; `choices`: what is registered for one."""
    lines = []
    for key, (kind, default, text) in keys.items():
        shown = default[0] if isinstance(default, tuple) and len(default) == 1 else default
        shown = list(shown) if isinstance(shown, tuple) else "null" if shown is None else shown
        lines.append(f"  {key}: {kind} = {shown if shown != '' else repr('')}")
        if choices is not None and key in choices:
            text = f"{text}. One of: {', '.join(choices[key])}"
        lines += wrapped(text) if text else []
    return lines


def wrapped(text: str) -> list[str]:
    """Return a help text as lines that fit the terminal, indented."""
    width = min(max(shutil.get_terminal_size().columns, 60), 120)
    return textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
