"""What the parts of `weft.experts` that reach beyond one process need beside torch: the extra ``experts``.

Those parts import this first, so that whoever lacks something hears what to install, under the names that pip knows:
the module ``grpc`` comes with ``grpcio``, and what pip calls ``grpc`` is something else.
"""

from importlib.util import find_spec

_PACKAGES = {
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "numpy": "numpy",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}

missing = [name for name in _PACKAGES if find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"experts on other machines need more packages, and {', '.join(_PACKAGES[each] for each in missing)} "
        "cannot be found: pip install 'weft[experts]'",
        name=missing[0],
    )
