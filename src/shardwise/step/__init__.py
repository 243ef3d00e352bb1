"""The steps of optimizers: in the background, through the device, from files."""
