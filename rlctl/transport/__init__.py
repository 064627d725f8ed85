"""gRPC behind the ports: channels, servers, handlers built from descriptors, status codes, tokens, links."""

import os

# gRPC would take part in forks, though what has asyncio does not survive one: where its threads were at work then, the
# child ended in a segmentation fault, whatever it was for (1.85). It reads this when the first channel is made.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
