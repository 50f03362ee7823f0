"""What people and their tools see of a server, over HTTP: a page, its numbers as JSON, and Prometheus metrics.

    Server.status() ──> summary.py ──> page.py ──────> GET /             people; see histogram.py style.py script.py
          |                 '────────> client/command.py                 the same numbers in a terminal
          ├──────────────────────────────────────────> GET /status.json  for programs
          '───────────> metrics.py ──────────────────> GET /metrics      for Prometheus

panel.py puts it together; listener.py, request.py and answer.py are the HTTP; markup.py keeps names in their place.

Nothing here knows the server: its one input is the status, plain numbers and texts as JSON has them. It imports
nothing beyond the standard library but prometheus-client, in metrics.py.
"""
