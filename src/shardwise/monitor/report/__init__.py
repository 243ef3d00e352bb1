"""Observed runs for people: values (``curves``, ``summary``), ``pictures``, and the ``page``."""
