"""What a worker alone has of a job's state, in memory that outlives it, so that the others can go on without it.

layout          which ranges of which tensors are a worker's part
files           the part, written and read: two files of shared memory for each slot
replication     copies of the files on other hosts
shard_checksum  whether the part has changed in a worker's memory where nothing writes to it
"""
