"""Other people's checkpoints, in and out; each is a `checkpoint.source.Source`, read by slices."""
