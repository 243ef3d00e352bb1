"""`ShardTensor`, and the operations on sharded tensors."""
