"""The parameter server: workers push gradients and pull weights, servers update; a clock says how far they may drift.

worker 0  ──push (round, lane, key)──►  server 0: keys 0 1      a *key* is a range of the flat layout, on one server
worker 1  ◄──weights (key, version)───  server 1: keys 2 3      a *version* counts the updates of one key

clock  staleness_policy                        when a worker may go on, and what a late push is worth
key_ranges  wire  channel  handshake           what travels, how, and between whom
client                                         a worker's side
server  server_core                            a server process, and its decisions without threads or sockets
round_by_round  on_arrival                     the two ways to apply pushes: whole rounds in order, or each at once
server_key                                     a key as its server holds it
staleness_stats                                what was seen on the way
update_log  replay_order  replay               what was read and applied, and how to do it again, bit for bit
"""
