"""State that rests elsewhere than on the device: files on disks, and the buffers that it passes.

Reading order: ``regions`` and ``stripes`` (integers: where bytes lie), ``transfers`` (what is under
way, and in which order), ``files`` (one unit's files; the seam to the system), ``ring`` (buffers),
``disk`` (all of one rank, and its threads), ``mapped`` (a file as memory); ``slab`` (host
memory, made at once); ``lane`` (through the device and back).
"""
