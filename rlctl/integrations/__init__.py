"""Names of other projects, so that code written for them finds them here."""
