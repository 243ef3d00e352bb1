"""Integers only: which modules form units, and where every element of a unit lies."""
