"""State in host memory and in files, and device buffers for its steps."""
