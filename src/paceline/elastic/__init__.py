"""What happens when a process of an elastic job dies, and how the others go on to the same bits.

    the coordinator (one, no torch)                           a worker
    failure_detector   whose time is up                       worker_agent       its connection to the coordinator
    slots              the processes of the job, who joins    recovery           from the end of its group to where
    membership         who goes on, and what is committed                        the step runs again
    step_log           the steps that are committed           memory_checkpoint  the state of those who died
                       └─ decisions: commits, generations, … are the same values on both sides ─┘

`faults` makes a process fail on order, and `random_faults` those of a running job, to test all this.
"""
