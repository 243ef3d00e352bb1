"""Plans for programs: plain data."""
