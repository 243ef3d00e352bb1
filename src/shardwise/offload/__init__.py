"""State in host memory and in files, and the buffers through which it passes the device."""
