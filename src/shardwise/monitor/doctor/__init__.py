"""Rules: what an observed run shows, one small function for each failure."""
