"""`paceline run`: starts the workers of every host, watches them, and says how it went.

The supervisor imports no torch; the fork server does, once for all workers of its host.

the processes of a host
  job                   what `paceline run` was asked for, checked before anything starts
  supervisor            starts this host's workers and servers, watches them, ends them
  fork_server           imports torch once, and forks every worker from it
  worker_main           a worker from its fork to its end
  output                what workers print, each line with its rank
  folders               the job's folders on this host
  notebook              a notebook's function on several workers
the job
  coordinator           host 0's supervisor: knows every process, and alone decides
  elastic_job           carries out what `Membership` decides in an elastic job
  agents                what the coordinator does to workers, on whichever host
connections
  control               from workers to the supervisor of their host, and the table of keys
  rendezvous            supervisors of several hosts join the coordinator
  host_link             between two supervisors
how it goes wrong, and ends
  exit_rules            when a job is over
  failure_attribution   one cause out of all failures that followed from it
  hangs                 a wait for other workers has lasted past its timeout
  busy_check            does a worker do anything?
"""
