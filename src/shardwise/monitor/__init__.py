"""Observed runs: spans, figures over all ranks, memory by unit, findings, reports."""
