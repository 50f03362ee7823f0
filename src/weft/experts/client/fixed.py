"""Experts at addresses that never change, where a directory would have nothing to tell.

{"ffn.0": "10.0.0.1:31330", "ffn.1": "10.0.0.2:31330"}
"""

from collections.abc import Mapping
from typing import Any

from weft.experts.address import address_fault
from weft.experts.checks import LONGEST, uid_fault
from weft.experts.directory import LocalDirectory


def fixed_faults(addresses: Mapping[Any, Any]) -> list[str]:
    """What is wrong with addresses by uid."""
    pairs = addresses.items()
    return [fault for uid, one in pairs for fault in (*uid_fault(uid), *address_fault(f"the address of {uid!r}", one))]


def fixed(addresses: Mapping[str, str]) -> LocalDirectory:
    """A directory that knows just these, for good."""
    directory = LocalDirectory()
    for uid, address in addresses.items():
        directory.declare(uid, address, ttl=LONGEST)
    return directory
