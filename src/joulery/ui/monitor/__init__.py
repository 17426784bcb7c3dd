"""The monitor's protocol: HTTP over a Unix socket, so that a program in any language can have itself measured.

::

    POST   /sessions  {"pid": 1234, "period": "4 ms", "out": "runs/mine"}   201 {"id", "run", "pid"}
    GET    /sessions                                                        200 [{"id", "run", "pid"}]
    GET    /sessions/ID/power?since_ns=0                                    200 CSV, as joulery account reads it
    DELETE /sessions/ID                                                     200 the report of the run

``period`` and ``out`` may be left out. An error is ``{"error": {"kind", "message", "hint"}}`` with status 400 (wrong
request), 404 (no such session), 409 (this machine cannot).
"""
