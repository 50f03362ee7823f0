"""The least that a server over gRPC does, one stream and one module: ``python bare_server.py '{"width": 512}'``.

    F rows -> outputs        T rows -> outputs, and the graph stays        B gradients -> those of the rows, and a step

No checks, keys, deadlines, batches or guards, and the module runs in the thread that reads. What it reaches of the
ideal is the most that anything over gRPC in Python can reach for a caller who waits for each answer.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import torch
from bare_words import BACKWARD, FORWARD, METHOD, OPTIONS, SERVICE, message, tensor
from module import feed_forward
from words import answer_until_the_end, take_stdout_aside


def main() -> None:
    """Serve until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    width = json.loads(sys.argv[1])["width"]
    module = feed_forward(width)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)

    def stream(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        rows = outputs = torch.empty(0)
        for asked in requests:
            kind, given = asked[:1], tensor(asked, width)
            if kind == FORWARD:
                with torch.no_grad():
                    yield message(kind, module(given))
            elif kind == BACKWARD:
                optimizer.zero_grad()
                outputs.backward(given)
                optimizer.step()
                assert rows.grad is not None
                yield message(kind, rows.grad)
            else:
                rows = given.requires_grad_()
                outputs = module(rows)
                yield message(kind, outputs.detach())

    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answer_until_the_end({"port": port}, lambda _: {})
    server.stop(None).wait()


if __name__ == "__main__":
    main()
