"""One unit: its parameters, storage, initial values, gathers and reductions."""
