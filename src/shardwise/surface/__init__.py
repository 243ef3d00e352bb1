"""The class, the methods and the state of sharded modules, with FSDP2's names; full parameters."""
