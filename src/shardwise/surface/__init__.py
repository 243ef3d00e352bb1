"""The class, methods and state of sharded modules, with FSDP2's names; `gathered`."""
