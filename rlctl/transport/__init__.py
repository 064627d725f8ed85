"""gRPC behind the ports: channels, servers, handlers built from descriptors, status codes, tokens, links."""
