"""Which rows, with which fields, tags and notes: the classes that callers pass around."""
