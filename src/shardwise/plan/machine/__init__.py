"""Seconds of operations on a machine, from the catalogue's figures or from measurements."""
