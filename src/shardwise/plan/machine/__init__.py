"""What operations cost on a machine: by the catalogue's figures, or as they were measured."""
