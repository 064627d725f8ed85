"""The ``rlctl`` command: one file per noun, printers in one place, everything heavy imported late."""
