"""Weights in shards, gathered when a unit uses them: fsdp, hybrid, and zero3 where workers share no memory."""
