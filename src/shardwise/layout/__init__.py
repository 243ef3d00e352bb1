"""Integers only: which modules form units, and where every element of a unit is.

Reading order: ``segments`` (where), ``units`` (which), then ``boxes`` (a range as boxes; who owns
it).
"""
