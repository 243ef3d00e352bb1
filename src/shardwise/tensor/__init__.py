"""`ShardTensor`, and what operations on sharded tensors give."""
