"""A program in time, on one rank among equals or on thousands that differ.

Reading order: ``scenario`` (what goes wrong), ``breakdown`` (busy, hidden, exposed),
``many_ranks``, ``simulate``, ``windows`` (a step of many micro-batches),
``goodput``, ``scaling``, ``timeline``.
"""
