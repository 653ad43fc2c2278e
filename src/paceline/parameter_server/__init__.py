"""The parameter server: workers push gradients and pull weights, servers update; a clock says how far they may drift.

worker 0  ──push (round, lane, key)──►  server 0: keys 0 1      a *key* is a range of the flat layout, on one server
worker 1  ◄──weights (key, version)───  server 1: keys 2 3      a *version* counts the updates of one key

clock  bounded_staleness  bounded_delay        when a worker may go on            (no torch in these)
treatment                                      what a late push is worth
application_log  replay_order                  what was read and applied, and how to do it again, bit for bit
staleness_stats                                what was seen on the way
"""
