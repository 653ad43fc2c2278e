"""Where the time of a run goes, and which worker is late: beside the run, never in its way.

events         what is written: one file per worker, a header and records of a fixed size
recorder       a worker writes them: after each step it queues one record, a thread of its own writes
run_events     the files of a run are read, and their clocks aligned
attribution    waiting is charged to the worker that arrived last, and to the part of the step that made it late
chrome_trace   some steps, as Perfetto shows them

The training writes; whoever reads does so in another process, while the run goes on or after it.
"""
