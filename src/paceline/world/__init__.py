"""Who a process is in its job, how it reaches its supervisor, what its bits depend on, and what its host can carry.

its place
  world               rank, size, host, where the others meet: a value that is passed on
  launchers           the world that follows from what a launcher left in the environment
  environment         the one module that touches `os.environ`
  variables           values of the environment, read with care
  explanation         the same in words, for `paceline doctor`
  lanes               which workers have which lanes
  known_names         strategies, backends and precisions, known without torch
the others
  rendezvous_store    where workers meet
  control             the worker's end of the control channel
  waiting             long waits for others, reported to the supervisor
  hang_board          who has not come, where no supervisor of ours knows
  flight_recorder     torch's record of a worker's last collectives, for a wait that timed out
  script_line         the line of the script that a warning, an error or a report of a wait names
  unauthenticated     limits for connections that have not proved the job's secret
this process and its host
  determinism         what bits depend on besides the data, and how it is pinned
  process             its name, and the free memory that it keeps
  processor_time      time on a processor, as the kernel counts it
  host_limits         cores, memory, processes, open files
  out_of_memory       what was held when a device had no more
  owned_folder        a folder that is this user's own
what people see
  messages            our messages, all through `logging`
  terminal            one line of progress, one table at the end
  checked_values      values that a user gave: which is wrong, and what it may be
  less_traffic        ways to send less than ddp does, for advice
"""
