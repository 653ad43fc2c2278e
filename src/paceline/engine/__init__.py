"""The user's loop on any number of workers: what `prepare` takes, a step, and what workers do between two of them.

what the user calls
  engine                     the Engine
  config                     what it is told: by the script, the launcher's flags and the machine
  auto_strategy              `strategy="auto"`
  accelerate_names           the names of Accelerate's Accelerator
  profiling                  `engine.profile`: torch's profiler over some steps
  one_line_errors            our own errors in one line, without our launcher too
prepare
  prepare                    the user's objects get what they need to train together
  sources                    what the user gave becomes a source of work items
  strategy_table             one strategy for each set of optimizers that act together; lanes are assigned
  memory_check               will it fit?
  adapted_models             adapters (LoRA) and the base that they are trained for
  activation_checkpointing   a block's rest is computed again when its backward needs it
  compilation                torch.compile, by blocks
  causal_masks               attention of transformers: no mask tensor where it is causal alone
  attention_kernels          which kernel a GPU takes for attention, and whether its bits are always the same
a step
  loop                       `for batch in loader`; the one place that tries a step again
  step                       from the lanes of a global batch to one update
  once_per_step              the body's optimizers and schedulers act once per step
  vote                       what workers tell each other at the end of a step
  lane_buffers               every lane begins with the step's buffers
  second_opinion             each k-th step, lanes are computed by another worker too
  sequence_parts             workers that share a sequence
  peer_checks                what workers that share a model have to have alike
what is refused, or told in a warning
  rules                      what people write in the loop's body
  forward_state              what forward keeps beside parameters and buffers
  body_state                 generators and tensors that the body carries from item to item
  loss_factor                a loss that is scaled by hand by what backward counts by itself
  outside_modules            modules of the script beside the prepared ones
between steps
  boundary                   values of all workers, gathered and combined
  evaluation                 every sample counted once
  stop_signals               a signal ends the loop of all workers after the same step
  progress                   one live line for the whole job
  replicas                   what all workers hold alike, watched
the state, and other workers
  state                      the state of a job, described once
  checkpoints                written while the training goes on
  facts                      what must be the same in all workers, and in a saved state
  group                      the workers that this one is with
  default_group              torch's default process group is the job's
  assembly                   taken apart and put together again when the workers change
  serving                    a server process of an elastic job
a loop that is compared, replayed or planned for
  recorded_step              a step that `paceline verify` compares
  replaying_source           work items in the order of a replayed log
  script_profile             `paceline plan SCRIPT` records the loop
  run_residuals              what a run has measured, for `paceline plan --residuals`
"""
