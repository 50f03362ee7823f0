"""What is wrong with the arguments of a remote expert, in words: told where it is made, and not at its first call."""

from inspect import signature
from typing import Any

from weft.experts.address import address_fault
from weft.experts.checks import kind_fault, seconds_fault, switch_fault, uid_fault
from weft.experts.client.connections import Connections
from weft.experts.client.retry import Retry
from weft.experts.client.transport import Transport
from weft.experts.compression import Policy
from weft.experts.directory import Directory
from weft.experts.tls import way_faults


def remote_faults(uid: Any, where: Any, **options: Any) -> list[str]:
    """Of `RemoteExpert`, whose arguments these are, whatever they are."""
    return [*uid_fault(uid), *_where_faults(where), *call_faults(address=isinstance(where, str), **options)]


def call_faults(
    *,
    address: bool,
    timeout: Any = 30.0,
    retry: Any = None,
    compression: Any = None,
    client: Any = "",
    accumulate: Any = False,
    keep_graph: Any = False,
    tls: Any = None,
    token: Any = None,
    **unknown: Any,
) -> list[str]:
    """Of the options of `RemoteExpert`; ``address``: whether it is made from one."""
    faults = option_faults(timeout, Policy() if compression is None else compression, client, accumulate, keep_graph)
    faults += kind_fault("retry", retry, Retry, "a Retry, such as Retry(attempts=3)", none=True)
    faults += way_faults(tls, token)
    if not address and (tls is not None or token is not None):
        faults.append("tls= and token= are for an address; a transport or connections have their own")
    known = ", ".join(list(signature(call_faults).parameters)[1:-1])
    return faults + [f"there is no option {name!r}, but there are {known}" for name in unknown]


def option_faults(timeout: Any, compression: Any, client: Any, accumulate: Any, keep_graph: Any) -> list[str]:
    """Of `CallOptions`."""
    faults = seconds_fault("timeout", timeout)
    if not isinstance(compression, Policy):
        faults.append(f"compression is {compression!r}, wanted a Policy, such as Policy(inputs='fp16'), or None")
    else:
        asked = {"output": compression.outputs, "input gradient": compression.input_gradients}
        each = [name for name, choice in asked.items() if not isinstance(choice, str | int)]
        faults += [f"compression has one choice per {name}; the server takes one wish for all of them" for name in each]
    faults += kind_fault("client", client, str, "a text: what servers know this caller by")
    faults += switch_fault("accumulate", accumulate)
    faults += switch_fault("keep_graph", keep_graph)
    return faults


def _where_faults(where: Any) -> list[str]:
    if isinstance(where, str):
        return address_fault("where", where)
    if isinstance(where, Connections | Transport):
        return []
    if isinstance(where, Directory):
        return ["where is a directory, wanted Connections(directory), which several experts share"]
    return [f"where is {where!r}, wanted the server's address (host:port), a Transport, or Connections to a directory"]
