"""Write the descriptor set next to each .proto of the sources: ``.venv/bin/python tools/protos.py``.

`torchweft.experts.protobuf` loads these files. Run it after every change of a .proto. It needs protoc, which the extra
``test`` brings.
"""

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"


def main() -> int:
    for proto in sorted(SOURCE.rglob("*.proto")):
        target = f"--descriptor_set_out={proto.with_suffix('.binpb')}"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports", target, proto.name]
        if code := subprocess.call(command, cwd=proto.parent):
            return code
        print(f"wrote {proto.with_suffix('.binpb').relative_to(SOURCE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
