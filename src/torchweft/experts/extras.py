"""Check for the packages of the extra ``experts``, which the parts of `weft.experts` beyond one process need.

Those parts import this module first, so that the error for a missing package names the extra to install. Python's
own error names the module, but pip has other names: ``grpc`` comes with ``grpcio``, and pip's ``grpc`` is another.
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
        f"experts on other machines need more packages, and {', '.join(_PACKAGES[name] for name in missing)} "
        "cannot be found: pip install 'torchweft[experts]'",
        name=missing[0],
    )
