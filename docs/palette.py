"""The colours of the site, from those of report pages and pictures."""

import re
import tomllib
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwise"
# The theme's variables, and the report page's.
BACKGROUNDS = {"primary": "paper", "secondary": "card", "hover": "line", "border": "line"}
FOREGROUNDS = {"primary": "text", "secondary": "quiet", "muted": "quiet"}


def colours() -> tuple[dict[str, str], dict[str, str]]:
    """Return the theme's colours for the light and for the dark scheme."""
    report = (SOURCE / "monitor" / "page.html.j2").read_text(encoding="utf-8")
    kinds = tomllib.loads((SOURCE / "svg.toml").read_text(encoding="utf-8"))["kinds"]
    rules = re.findall(r":root \{.*--paper.*\}", report)
    accents = kinds["param_shards"], kinds["param_full"]
    light, dark = (_of(*each) for each in zip(rules, accents, strict=True))
    return light, dark


def _of(rule: str, accent: str) -> dict[str, str]:
    of = dict(re.findall(r"--(\w+): (#\w+)", rule))
    return (
        {f"color-background-{name}": of[value] for name, value in BACKGROUNDS.items()}
        | {f"color-foreground-{name}": of[value] for name, value in FOREGROUNDS.items()}
        | {f"color-brand-{name}": accent for name in ("primary", "content", "visited")}
    )
