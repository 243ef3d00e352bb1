"""Units of modules, and the offsets of every element of a unit. Integers only."""
