"""Integers only: which modules form units, and where every element of a unit lies.

Reading order: ``segments`` (where), then ``units`` (which).
"""
