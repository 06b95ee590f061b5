"""The brainlane daemon. Read in this order, and any other line can be predicted:

states.py, migrations/0001_lane.sql, store.py, worker.py, recovery.py, api.py, daemon.py.

Arrows point down only; rooms on one line never import each other:

    __main__  localbrain
    daemon  check
    watchdog
    api  worker  recovery  server  upkeep  verify
    record  decisions  intake  streams  parameters  backup
    acceptor  store  queries  retention  brains  gate  spool  access  waiters
    db  events
    states  config  turnaway  filesystem  later
    errors
    wire  systemd
"""
