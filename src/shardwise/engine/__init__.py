"""The engine: the order in which units are gathered, used, reduced and freed."""
