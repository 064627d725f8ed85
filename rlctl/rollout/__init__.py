"""Which stage generates a sample, and how it goes on when it is cut: pure, without I/O or a clock of its own."""
