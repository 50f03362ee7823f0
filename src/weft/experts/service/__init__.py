"""What a server and its clients agree on, so that neither imports the other.

names.py         the gRPC service, its methods and options      description.py   an expert's schemas <-> JSON
receipt.py       what a result says of steps and durability      address.py       host:port
pem.py, certificates.py   files, and who one is by them          forks.py, crew.py   gRPC's forks and threads
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.service.description import Description, describe, read_description
from weft.experts.service.receipt import Receipt, read_receipt

__all__ = ["Description", "Receipt", "describe", "read_description", "read_receipt"]
