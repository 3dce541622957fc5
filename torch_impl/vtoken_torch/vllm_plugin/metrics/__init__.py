"""What an engine counts, on the server's own ``/metrics``.

The engine's process writes, the API server's process shows:

    names       the table of metrics
    readings    where each number comes from
    channel     anonymous shared memory between the two processes: no file, so none is left behind
    exposition  to and from ``prometheus_client``
    publisher   when numbers are written
    clocks      seconds spent in policies and planners
"""
