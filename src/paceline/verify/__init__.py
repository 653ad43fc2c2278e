"""`paceline verify`: one script at several settings, and the first thing that is not the same.

in the launcher                                         in every worker of a setting
  jobs        a setting is a job of `paceline run`        request      what verify wants of it
  record      what its workers wrote                      recorder     fingerprints of each item and step
  comparison  the first difference of two runs            operators    each operator of one item, for a closer look
  first_different_operator   where two lists of operators part
  causes      what it was likely caused by
  report      for people, and as JSON

The launcher's side imports no torch, but for the closer look. A job meets the recorder at one place:
`engine/recorded_step.py`, which `prepare` puts in place of a `TrainStep`.
"""
