"""Plans for programs and people: ``facts`` (plain data), ``pictures`` (SVG), ``page`` (HTML)."""
