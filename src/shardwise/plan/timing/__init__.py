"""A program in time, on one rank among equals or on thousands that differ."""
