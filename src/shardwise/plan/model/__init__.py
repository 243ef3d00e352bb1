"""What one micro-batch of a model does, in program order: a `Tape`, traced or by formula."""
