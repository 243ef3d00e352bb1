"""One micro-batch of a model in program order: a `Tape`, traced or by formula."""
