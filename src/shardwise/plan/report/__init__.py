"""Plans for programs and people.

Reading order: ``facts`` (plain data), ``times`` (where a step's time is), ``pictures`` (SVG),
``page`` (HTML).
"""
