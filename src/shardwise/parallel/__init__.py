"""Models over other axes than the data: parts of sequences, experts."""
