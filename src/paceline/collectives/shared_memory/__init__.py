"""Our own process group, over memory that the ranks of one host share: the backend "paceline" of torch.distributed.

group              what c10d calls: a method for each collective, put in the queue
calls              the short forms in which people call them, and checks of what they give
operations         the collectives themselves: write, wait at the barrier, read
point_to_point     send and receive
barrier            every rank says what it is about to do, and goes on when all have said the same
segment            the memory, gone with the last rank
kernels            adding and waiting: in C where there is a compiler, or in torch
kernel_build       how kernels.c becomes a library
"""
