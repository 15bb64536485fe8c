"""A cluster as data: levels, links, and which processes belong to which part of a machine."""
