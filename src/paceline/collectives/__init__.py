"""How tensors move between workers: groups, all-reduce algorithms, and the canonical sum of gradient buckets.

groups
  communicator              one operation between workers; every wait ends and names the peer
  process_groups            groups of c10d for each kind of device: gloo, our own, NCCL
  shared_memory/            our own: a process group over shared memory
  collective_queue          operations in the order in which they were asked for
  byte_count                what moved, counted where it is handed to the wire
gradients
  canonical_sum             the tree over lanes that does not know how many workers there are
  gradient_exchange         a bucket of all workers becomes its sum
schedules
  schedule                  who sends which chunk to whom at which hop
  rounds                    the hops of all ranks at once
  executor                  runs any schedule over messages
  choice                    the cheapest one for this many bytes, ranks and hosts
algorithms
  ring_all_reduce           neighbours only
  halving_doubling          partners at distance 1, 2, 4, …
  direct_all_reduce         every chunk has an owner, who gets all parts at once
  tree_all_reduce           pairs, pairs of pairs, and down again
  star_all_reduce           rank 0 gathers, adds and sends back
  hierarchical_all_reduce   inside hosts, across them, inside again
"""
