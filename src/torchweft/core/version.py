"""The version of torchweft, read from the metadata of its distribution when it is first asked for.

A literal here would be a second place to keep in step with pyproject.toml. A checkout that is only on the path has no
metadata, and its version says so.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("torchweft")
except PackageNotFoundError:
    __version__ = "0+not.installed"
