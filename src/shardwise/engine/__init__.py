"""When: in which order units are gathered, used, reduced and freed."""
