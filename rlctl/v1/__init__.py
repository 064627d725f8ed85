"""Generated stubs of the contract in protos/rlctl/v1. Regenerate with ``tools/protos``; do not edit."""
