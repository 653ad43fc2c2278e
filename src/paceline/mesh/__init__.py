"""The mesh: data parallelism beside tensor and context parallelism.

mesh              sizes of the axes, and this worker's place on them                        known without torch
peers             the workers that differ in the tensor-parallel coordinate alone
tensor_parallel   a plan shards a model's parameters; outside of forward each is its local tensor
plans             whose plan it is, and what is wrong with one
random_streams    equal inside a tensor-parallel group, but for sharded activations
full_tensors      of sharded parameters, for hashes and checkpoints, and back
"""
