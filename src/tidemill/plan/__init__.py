"""What a cluster is, as data that plans are made of."""
