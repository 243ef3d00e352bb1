"""What a run does: spans, figures over all ranks, memory by unit; kept in files and told live."""
