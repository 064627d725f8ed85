"""A stage server: rank 0 of one engine. Checks what its state allows, relays to its ranks, adds up their answers."""
