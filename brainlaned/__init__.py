"""The brainlane daemon. Read in this order, and any other line can be predicted:

states.py, migrations/0001_lane.sql, store.py, worker.py, recovery.py, api.py, daemon.py.

Arrows point down only; rooms on one line never import each other:

    __main__  localbrain
    daemon  check
    watchdog
    api  worker  recovery  server
    record  decisions  intake  streams
    acceptor  store  queries  brains  gate  spool  access
    db  events
    states  config  turnaway  filesystem
    errors
    wire  systemd
"""
