"""What a terminal would show."""

from __future__ import annotations

from rich.console import Console, RenderableType


def render(renderable: RenderableType, width: int = 100) -> str:
    """As text without colour."""
    console = Console(width=width, no_color=True, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
