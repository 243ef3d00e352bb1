"""What operations cost on a machine: by the catalogue's figures, or as they were measured.

Reading order: ``hardware``, ``catalogue_links``, ``catalogue_accelerators``, ``catalogue``,
``efficiencies`` (what share of a figure is reached), ``links`` (collectives over a topology),
``pricing``; ``calibration`` (the file of what was measured), ``calibrated``.
"""
